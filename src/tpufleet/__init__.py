"""Submit a JAX job once; it finishes."""

__version__ = "0.1.0"

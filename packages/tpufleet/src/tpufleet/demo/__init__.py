"""The training program that `tpu demo` runs."""

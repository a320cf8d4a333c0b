"""One suite for every store, another for every provider."""

"""What `tpu demo` runs: a small, honest training program."""

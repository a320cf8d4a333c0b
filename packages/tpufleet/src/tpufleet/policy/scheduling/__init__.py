"""Who gets which slices, and when."""

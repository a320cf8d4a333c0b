"""Values in text and JSON: durations, sizes, bounds, encoding."""

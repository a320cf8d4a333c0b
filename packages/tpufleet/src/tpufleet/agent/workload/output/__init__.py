"""What the program of an attempt leaves: output, metrics, progress and a result."""

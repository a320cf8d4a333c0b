"""Sources of slices. Every provider passes the suite in tests/contract."""

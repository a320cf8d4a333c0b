"""Sources of slices. Every provider passes the one contract suite in tests/contract."""

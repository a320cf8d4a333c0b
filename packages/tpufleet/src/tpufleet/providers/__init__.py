"""Sources of slices. Every provider passes the one contract suite in packages/tpufleet/tests/contract."""

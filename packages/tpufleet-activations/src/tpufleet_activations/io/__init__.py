"""Storage backends, shard files, and reading and verifying datasets."""

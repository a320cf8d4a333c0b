"""Formats of the older extraction scripts: pickle shards, checkpoints, stream manifests."""

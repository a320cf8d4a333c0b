"""The GKE environment."""

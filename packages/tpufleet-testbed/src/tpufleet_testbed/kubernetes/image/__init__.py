"""Builds the container image from the Containerfile without a container engine."""

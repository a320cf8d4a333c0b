"""Kubernetes control planes on this machine, as plain processes. Jobs on them are others' work."""

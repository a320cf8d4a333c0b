"""Kubernetes API client: resources as plain dictionaries, watch caches, probes.

Needs the extra `k8s` (lightkube).
"""

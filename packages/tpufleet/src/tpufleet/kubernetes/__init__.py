"""Kubernetes API client: resources as plain dictionaries, watch caches, leader election, events.

Needs the extra `k8s` (lightkube).
"""

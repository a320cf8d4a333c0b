"""Speaking with a Kubernetes API server: resources as plain data, mirrors, leases, events.

Needs the extra `k8s` (lightkube). What to say is decided elsewhere.
"""

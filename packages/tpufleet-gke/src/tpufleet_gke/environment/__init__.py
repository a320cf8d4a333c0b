"""The GKE environment: one cluster.yaml becomes infrastructure, add-ons, queues and pipelines."""

"""Stand-ins for Google Cloud on one machine: Kubernetes, the Cloud TPU API, the GKE API."""

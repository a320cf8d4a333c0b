"""The Kubernetes side: reading pods and their owners, events, and the admission webhook."""

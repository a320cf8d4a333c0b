"""A real Kubernetes node on this machine: kubelet, containerd and DNS on a bridge network."""

"""A Kubernetes control plane on this machine, as plain processes, with KWOK or real nodes."""

"""What the provisioner knows of pods, owners and node pools. Pure."""

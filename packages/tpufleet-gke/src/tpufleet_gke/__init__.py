"""GKE: node pools for JobSets (`provisioner`), and clusters from one file (`environment`)."""

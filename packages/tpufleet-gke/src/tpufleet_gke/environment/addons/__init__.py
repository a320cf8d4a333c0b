"""What runs in the cluster: queues, the Helm chart, example JobSets."""

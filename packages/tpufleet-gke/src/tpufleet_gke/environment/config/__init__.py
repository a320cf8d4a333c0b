"""The file cluster.yaml: its fields, checks, JSON schema and starter."""

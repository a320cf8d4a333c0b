"""Cloud Build pipelines."""

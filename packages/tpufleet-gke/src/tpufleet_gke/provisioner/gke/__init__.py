"""The GKE side: node pool specs, API calls, and what API failures mean."""

"""The provider `gke`: an order of slices is one JobSet, whose pods run the agent."""

"""Creates GKE node pools for pending JobSets and deletes them: pure planning, thin API clients."""

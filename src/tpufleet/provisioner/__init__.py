"""Node pools for JobSets, whoever made them: pure plan, thin API."""

"""Facts, pure: jobs, attempts, slices and hosts. No clock, disk or network."""

"""Facts, pure: what jobs, attempts, slices and hosts are. No time, disk or network."""

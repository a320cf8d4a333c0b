"""Jobs and their attempts: the job file, states, end reasons, search."""

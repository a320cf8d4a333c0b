"""Jobs: submission, commands, queries, logs."""

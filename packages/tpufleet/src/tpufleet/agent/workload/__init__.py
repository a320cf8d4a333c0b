"""One attempt on this host: its folder, processes, environment, logs, progress and exit."""

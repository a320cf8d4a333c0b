"""The HTTP API: routes, commands, queries, heartbeats, streams and files."""

"""The HTTP API: commands in, answers out, heartbeats in, assignments out."""

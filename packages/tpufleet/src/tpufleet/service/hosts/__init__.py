"""Hosts: heartbeats, assignments, commands."""

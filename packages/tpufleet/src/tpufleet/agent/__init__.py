"""Runs on every host: executes the assigned attempt, sends heartbeats, logs and results.

The agent only makes outgoing calls to the server; nothing connects to it.
"""

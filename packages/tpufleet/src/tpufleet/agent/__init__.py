"""Runs on every host: executes the assigned attempt, sends heartbeats, logs and results.

The agent only makes outgoing calls to the control plane; nothing connects to it.
"""

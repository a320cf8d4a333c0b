"""Simulated slices on this machine: one agent process per host, faults on command or by plan."""

"""Ports for programs that choose none themselves."""

from __future__ import annotations

from tpufleet_testbed.kubernetes import cluster_layout


def free_port() -> int:
    """No connection of another test gets it before the program listens."""
    return cluster_layout.free_ports(1)[0]

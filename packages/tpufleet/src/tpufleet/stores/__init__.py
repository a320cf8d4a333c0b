"""Persistent state. Every store passes the contract suite in packages/tpufleet/tests/contract."""

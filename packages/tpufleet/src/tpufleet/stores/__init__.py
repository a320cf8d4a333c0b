"""Persistent state. Every store passes the contract suite in tests/contract."""

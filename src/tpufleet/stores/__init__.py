"""Where state lives. Every store passes the one contract suite in tests/contract."""

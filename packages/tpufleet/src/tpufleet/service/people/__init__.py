"""Users, tokens, the audit log, costs."""

"""Notifications: the outbox, and what sends it."""

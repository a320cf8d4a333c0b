"""HTTP verbs: what users, views and agents import."""

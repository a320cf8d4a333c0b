"""Decisions, pure: data and `now` in, data that carries its reason out. They do not log."""

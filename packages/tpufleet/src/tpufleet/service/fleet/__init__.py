"""Slices, pools and reservations."""

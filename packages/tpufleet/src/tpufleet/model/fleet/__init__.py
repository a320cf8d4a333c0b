"""Slices, hosts, pools and reservations."""

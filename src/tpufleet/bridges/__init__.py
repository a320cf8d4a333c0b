"""Bridges from external queues: requests become jobs, and job results are written back."""

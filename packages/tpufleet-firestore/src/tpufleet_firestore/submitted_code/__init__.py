"""Runs code that a client sent as text, and returns its result.

These files travel with the code in the job's snapshot, so they need only Python and JAX on the host
and import nothing of tpufleet but each other.
"""

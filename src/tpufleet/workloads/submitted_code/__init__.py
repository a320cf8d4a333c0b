"""Code that a client sent as text: run on a slice, and its result handed back.

These files travel with the code in the job's snapshot. So they need nothing on the host but Python
and JAX, and import nothing of ours but each other.
"""

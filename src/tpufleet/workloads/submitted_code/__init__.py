"""Code that a client sent as text: run on a slice, and its result handed back.

`supervise.py` and `inside.py` travel with the code in the job's snapshot, so they need nothing on
the host but Python and JAX, and import nothing of ours.
"""

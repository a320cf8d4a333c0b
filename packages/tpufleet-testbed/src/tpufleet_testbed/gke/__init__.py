"""Emulator of the GKE node-pool API (google.container.v1), for Google's own client.

Its node pools become KWOK nodes of a local control plane.
"""

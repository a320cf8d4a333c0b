"""GKE's node-pool API, emulated at its wire: google.container.v1 for Google's own client.

Its pools become KWOK nodes of a local control plane, and it can be told to fail in GKE's ways.
"""

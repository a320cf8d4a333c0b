"""TPU types, zones, machines and prices."""

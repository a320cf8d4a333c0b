"""TPUs as Compute Engine instances."""

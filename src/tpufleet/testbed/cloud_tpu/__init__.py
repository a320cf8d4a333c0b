"""A Cloud TPU API on this machine: the same wire, no bill, and every fault on command."""

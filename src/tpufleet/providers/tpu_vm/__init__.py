"""Slices as TPU VMs, on Google's own client of the Cloud TPU API."""

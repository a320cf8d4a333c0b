"""Emulator of the Cloud TPU API v2: same wire protocol, no cost, faults on command."""

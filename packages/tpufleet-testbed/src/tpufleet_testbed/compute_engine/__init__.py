"""Emulator of Compute Engine for TPUs: instances, templates, managed groups, policies, REST."""

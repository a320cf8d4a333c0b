"""Terraform stages: generated, run, and their plans in words."""

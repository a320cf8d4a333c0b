"""Builds programs from their parts. Concrete stores and providers are named here alone."""

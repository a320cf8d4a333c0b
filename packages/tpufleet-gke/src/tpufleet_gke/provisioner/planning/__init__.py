"""Decisions about node pools. Pure: state in, plan out."""

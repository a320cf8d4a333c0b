"""Activation extraction: run a decoder over samples and store what its layers say, exactly once."""

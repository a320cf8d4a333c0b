"""Users, and what they set, spend and receive."""

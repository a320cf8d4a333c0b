"""The provider `local`: slices simulated by processes on this machine."""

"""The server itself: status, metrics, retention."""

"""The web page: its files, and the sessions of browsers."""

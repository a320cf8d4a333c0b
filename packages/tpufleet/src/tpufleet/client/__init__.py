"""HTTP clients of the server, for users (`fleet`) and agents (`agents`)."""

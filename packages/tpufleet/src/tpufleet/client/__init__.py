"""HTTP clients of the control plane, for users (`fleet`) and agents (`agents`)."""

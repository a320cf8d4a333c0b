"""What Linux offers to keep processes together and apart: control groups and namespaces."""

"""Workloads that ship with tpufleet. They use `tpufleet.runtime`, never the control plane."""

"""Workloads that ship with tpufleet. They know `tpufleet.runtime`, never the platform."""

"""Rows for a training process, from a running extraction or from a stored dataset."""

from tpufleet_activations.streams.rows import RowStream as RowStream
from tpufleet_activations.streams.rows import stream as stream

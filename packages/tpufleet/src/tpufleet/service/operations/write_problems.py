"""Whether the server can record what it accepts."""

from __future__ import annotations

from pathlib import Path

from tpufleet import disk_space
from tpufleet.errors import FleetError, StorageFull
from tpufleet.stores.base import Store


def write_problem(store: Store, state: Path) -> FleetError | None:
    """Of the database, or of the disk of the state folder. Nothing is written to find out."""
    error = store.write_error()
    if error is None and disk_space.is_full(state):
        return StorageFull(f"no space left on the disk of {state}")
    return error

"""Operations that create or adopt nodes, saved so that they are checked again after a crash."""

from __future__ import annotations

import os
import threading
from datetime import datetime
from pathlib import Path

import msgspec

from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.values import encoding


class Creation(msgspec.Struct, frozen=True, kw_only=True):
    slice_id: SliceId
    zone: str
    operation: str  # empty: saved before the call, whose outcome is not known
    asked_at: datetime
    node: str = ""  # that a person made, and that is being adopted
    order: str = ""  # label of the order, where its slices are created one by one
    request_id: str = ""  # that a repeated call has too
    capacity: Capacity | None = None


class PendingCreations:
    """By slice. Without a folder, in memory only."""

    def __init__(self, folder: Path | None) -> None:
        self._file = folder / "creations.json" if folder is not None else None
        self._lock = threading.Lock()
        self._all: dict[SliceId, Creation] = {}
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._file.exists():
                saved = encoding.from_json(self._file.read_bytes(), tuple[Creation, ...])
                self._all = {creation.slice_id: creation for creation in saved}

    def add(self, creation: Creation) -> None:
        with self._lock:
            self._all[creation.slice_id] = creation
            self._save()

    def remove(self, *slices: SliceId) -> None:
        with self._lock:
            removed = [slice_id for slice_id in slices if self._all.pop(slice_id, None)]
            if removed:
                self._save()

    def get(self, slice_id: SliceId) -> Creation | None:
        with self._lock:
            return self._all.get(slice_id)

    def in_zone(self, zone: str) -> list[Creation]:
        with self._lock:
            return [creation for creation in self._all.values() if creation.zone == zone]

    def _save(self) -> None:
        if self._file is not None:
            draft = self._file.with_suffix(".new")
            draft.write_bytes(encoding.to_json(tuple(self._all.values())))
            os.replace(draft, self._file)

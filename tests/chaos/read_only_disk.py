"""A disk that the kernel makes read-only, as it does after an error: a preloaded library refuses
every change below a folder, and counts what it refused."""

from __future__ import annotations

import struct
from pathlib import Path

from tests.chaos import preload

SOURCE = Path(__file__).with_suffix(".c")
STATE = struct.Struct("qq")  # whether it is read-only, and how many changes were refused


class ReadOnlyDisk:
    def __init__(self, folder: Path, disk: Path) -> None:
        self.library = preload.build(SOURCE, folder)
        self._state = folder / "read_only"
        self._state.write_bytes(STATE.pack(0, 0))
        self._state.chmod(0o666)  # jobs run as another user
        self.variables = {"CHAOS_READ_ONLY": str(self._state), "CHAOS_DISK": str(disk)}

    @property
    def works(self) -> bool:
        return self.library is not None

    def set(self, read_only: bool) -> None:
        with self._state.open("r+b") as file:  # the same file: it is mapped
            file.write(struct.pack("q", read_only))

    @property
    def refused(self) -> int:
        _, refused = STATE.unpack(self._state.read_bytes())
        return refused

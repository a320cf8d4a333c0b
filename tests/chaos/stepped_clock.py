"""Wall clocks that can be set: a preloaded library adds an offset to what programs read."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Literal

from tests.chaos import preload

SOURCE = Path(__file__).with_name("stepped_clock.c")


class SteppedClock:
    """One clock of the servers and one of the hosts. Without a compiler neither can be set."""

    def __init__(self, folder: Path) -> None:
        self._prefix = folder / "clock"
        self.library = preload.build(SOURCE, folder)
        self.variables = {"CHAOS_CLOCK": str(self._prefix)}
        self.offsets = {"servers": 0, "hosts": 0}
        for who in self.offsets:
            self._write(who, 0)

    @property
    def works(self) -> bool:
        return self.library is not None

    def set(self, who: Literal["servers", "hosts"], seconds: int) -> int:
        """Set the clock to the real time plus this offset. By how much it stepped."""
        step = seconds - self.offsets[who]
        self.offsets[who] = seconds
        self._write(who, seconds)
        return step

    def _write(self, who: str, seconds: int) -> None:
        path = Path(f"{self._prefix}.{who}")
        with path.open("r+b" if path.exists() else "wb") as file:  # the same file: it is mapped
            file.write(struct.pack("q", seconds))
        path.chmod(0o644)

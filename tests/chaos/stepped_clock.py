"""Wall clocks that can be set: a preloaded library adds an offset to what programs read."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path
from typing import Literal

SOURCE = Path(__file__).with_name("stepped_clock.c")


class SteppedClock:
    """One clock of the servers and one of the hosts. Without a compiler neither can be set."""

    def __init__(self, folder: Path) -> None:
        self._prefix = folder / "clock"
        self._library = folder / "stepped_clock.so"
        self.offsets = {"servers": 0, "hosts": 0}
        for who in self.offsets:
            self._write(who, 0)
        compiler = shutil.which("cc")
        self.works = compiler is not None
        if compiler is not None:
            subprocess.run(
                [compiler, "-shared", "-fPIC", "-O1", "-o", self._library, SOURCE, "-ldl"],
                check=True,
            )

    @property
    def environment(self) -> dict[str, str]:
        """Of a server; its agents and their jobs inherit it."""
        if not self.works:
            return {}
        variables = {"LD_PRELOAD": str(self._library), "CHAOS_CLOCK": str(self._prefix)}
        return {**variables, "TPUFLEET_LOCAL_ENV": ",".join(variables)}

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

"""Waits until a slice takes this pod's seat: `python -m tpufleet.agent.seats`.

Runs before the agent, in a container of its own, for it alone sees the Secret with the tokens of
the whole gang. Lays the entry of its seat ready for the agent; a seat that nobody takes has none.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

WAIT_SECONDS = 600.0
LOOK_EVERY = 1.0
TAKEN = 128 + signal.SIGTERM


def run(environ: Mapping[str, str], wait_seconds: float = WAIT_SECONDS) -> int:
    entry = Path(environ["TPUFLEET_SEATS"], environ["TPUFLEET_SEAT"])
    deadline = time.monotonic() + wait_seconds
    while not entry.is_file():
        if time.monotonic() > deadline:
            return 0
        time.sleep(min(LOOK_EVERY, wait_seconds / 10))
    private = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with os.fdopen(os.open(environ["TPUFLEET_SEAT_FILE"], private, 0o600), "w") as out:
        out.write(entry.read_text())
    return 0


if __name__ == "__main__":
    # The first process of a container does not die of a signal that it does not handle.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TAKEN))
    sys.exit(run(os.environ))

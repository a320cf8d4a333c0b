"""Starts the agent in a pod: `python -m tpufleet.agent.pods`.

Which slice it serves is written in a file of its seat (a mounted Secret). A seat whose slice was
lost or given back has none until the next slice takes it; the pod waits for that, for a while.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tpufleet.agent import main, threads

WAIT_SECONDS = 600.0
LOOK_EVERY = 1.0
NOT_NEEDED = 0
TAKEN = 128 + signal.SIGTERM


def run(
    environ: Mapping[str, str],
    start: Callable[[Mapping[str, str]], int] = main.run,
    wait_seconds: float = WAIT_SECONDS,
) -> int:
    entry = Path(environ.get("TPUFLEET_SEATS", "")) / environ.get("TPUFLEET_SEAT", "")
    deadline = time.monotonic() + wait_seconds
    while not entry.is_file():
        if time.monotonic() > deadline:
            threads.say("no slice took this seat; leaving it")
            return NOT_NEEDED
        time.sleep(min(LOOK_EVERY, wait_seconds / 10))
    try:
        said = json.loads(entry.read_text())
        slice_id, token = str(said["slice"]), str(said["token"])
    except (ValueError, KeyError) as error:
        threads.say(f"{entry} does not say which slice this is: {error}")
        return main.BAD_SETTINGS
    work = Path(environ.get("TPUFLEET_WORK", ""))
    work.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = work / "slice-token"
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(token)
    told = {"TPUFLEET_SLICE": slice_id, "TPUFLEET_TOKEN_FILE": str(file)}
    # A pod is ended when its node is taken, drained or needed for others.
    return start({**environ, **told, "TPUFLEET_SIGTERM_MEANS": "preempted"})


if __name__ == "__main__":
    # The first process of a container does not die of a signal that it does not handle.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TAKEN))
    sys.exit(run(os.environ))

"""Starts the agent in a pod: `python -m tpufleet.agent.pods`.

Which slice it serves, and the token that proves it, was laid ready in a file by `agent.seats`. The
workload runs as the same user, so the file is taken away and this process closed to others before
any workload starts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tpufleet.agent import bootstrap_token, main, threads

NOT_NEEDED = 0
TAKEN = 128 + signal.SIGTERM


def run(environ: Mapping[str, str], start: Callable[[Mapping[str, str]], int] = main.run) -> int:
    bootstrap_token.close_memory()
    file = Path(environ.get("TPUFLEET_SEAT_FILE", ""))
    try:
        entry = file.read_text()
        file.unlink()
    except FileNotFoundError:
        threads.log("no slice took this seat; leaving it")
        return NOT_NEEDED
    try:
        said = json.loads(entry)
        slice_id, token = str(said["slice"]), str(said["token"])
    except (ValueError, KeyError, TypeError) as error:
        threads.log(f"{file} does not say which slice this is: {error}")
        return main.EXIT_BAD_SETTINGS
    told = {"TPUFLEET_SLICE": slice_id, "TPUFLEET_TOKEN": token}
    # A pod is ended when its node is taken, drained or needed for others.
    return start({**environ, **told, "TPUFLEET_SIGTERM_MEANS": "preempted"})


if __name__ == "__main__":
    # The first process of a container does not die of a signal that it does not handle.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TAKEN))
    sys.exit(run(os.environ))

"""Writes down what a process of a job does, outside of the slice.

LEDGER/<attempt>.<process>.jsonl   what it did, when, as which process of the machine
LEDGER/<attempt>.<process>.alive   locked for as long as the process lives, or one that it forked
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tpufleet import runtime

LEDGER = Path(os.environ["LEDGER"])
here = runtime.context()
me = f"{here.attempt}.{here.process_id}"
# Eight processes, then always some more: four of them fork a successor in a new session and exit,
# so that no list of processes is ever complete. They would live for ten minutes.
FORK_BOMB = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
end = time.monotonic() + 600
for generation in range(3):
    if os.fork() == 0:
        os.setsid()
chain = os.getpid() % 2
while time.monotonic() < end:
    if chain and os.fork():
        os._exit(0)
    if chain:
        os.setsid()
    time.sleep(0.05)
"""


def note(kind: str, **facts: object) -> None:
    """One line, written at a stroke, so that a kill leaves it whole or not at all."""
    line = {"kind": kind, "at": time.monotonic(), "pid": os.getpid(), **facts}
    os.write(ledger, json.dumps(line).encode() + b"\n")


def others_alive() -> list[str]:
    """Processes of other attempts of this job that live at this moment."""
    found = []
    for path in LEDGER.glob("*.alive"):
        if path.name.split(".")[0] == str(here.attempt):
            continue
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(path.name.removesuffix(".alive"))
    return found


def leave_fork_bomb() -> None:
    """Without our session, our environment or any other mark of ours; but it keeps the lock."""
    subprocess.Popen(
        ["setsid", "env", "-i", sys.executable, "-c", FORK_BOMB],
        pass_fds=[alive.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


LEDGER.mkdir(parents=True, exist_ok=True)
alive = open(LEDGER / f"{me}.alive", "wb")  # noqa: SIM115 (held until the process ends)
fcntl.flock(alive, fcntl.LOCK_EX)
ledger = os.open(LEDGER / f"{me}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
runtime.install_stop_handler()
if os.environ.get("FORK_BOMB"):
    leave_fork_bomb()

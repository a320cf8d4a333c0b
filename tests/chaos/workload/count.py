"""Counts steps with checkpoints, and writes down all that it does.

LEDGER/result.<process>            the digest over all steps, once it has finished
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time

from notes import LEDGER, here, me, note, others_alive

from tpufleet import runtime

TOTAL = int(os.environ["STEPS"])
PAUSE = float(os.environ["STEP_SECONDS"])
SAVE_EVERY = 4
LINES_A_STEP = 5


def say(number: int) -> None:
    digest = hashlib.sha256(f"{me}:{number}".encode()).hexdigest()
    os.write(1, f"{me} line {number} {digest}\n".encode())


def save(step: int, state: str) -> None:
    part = json.dumps({"step": step, "state": state})
    runtime.checkpoints.save(step, lambda folder: (folder / "state.json").write_text(part) and None)
    note("saved", step=step)


step, state, lines = -1, "", 0
newest = runtime.checkpoints.latest()
if newest is not None:
    part = newest.part(min(here.process_id, newest.processes - 1))  # it may have run on fewer
    kept = json.loads((part / "state.json").read_text())
    step, state = kept["step"], kept["state"]
note("start", after=step, others=others_alive())
while step < TOTAL - 1:
    if runtime.should_stop():
        if here.num_processes == 1 and step >= 0:
            save(step, state)
        note("stopped", lines=lines)
        sys.exit("asked to stop")  # not 0: the work is not done
    time.sleep(PAUSE)
    step += 1
    state = hashlib.sha256(f"{state}:{here.process_id}:{step}".encode()).hexdigest()
    for _ in range(LINES_A_STEP):
        lines += 1
        say(lines)
    note("step", step=step, lines=lines, others=others_alive())
    runtime.progress(step, total=TOTAL)
    if step % SAVE_EVERY == SAVE_EVERY - 1:
        save(step, state)
draft = LEDGER / f".result.{me}"
draft.write_text(json.dumps({"state": state, "attempt": here.attempt}))
draft.replace(LEDGER / f"result.{here.process_id}")
note("finished", lines=lines)

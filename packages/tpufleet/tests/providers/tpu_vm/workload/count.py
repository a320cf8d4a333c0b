"""Counts to a number with checkpoints; after a preemption it resumes. Arguments: the number, the
seconds that a step takes, and if they differ those in later attempts."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tpufleet import runtime

TOTAL, EVERY = int(sys.argv[1]), 5
PAUSE = float(sys.argv[-1] if runtime.context().attempt else sys.argv[2])


def main() -> None:
    runtime.install_stop_handler()
    newest = runtime.checkpoints.latest()
    step = newest.step if newest else 0
    counted = json.loads((newest.part(0) / "count.json").read_text()) if newest else []

    def save() -> None:
        runtime.checkpoints.save(
            step, lambda folder: Path(folder, "count.json").write_text(json.dumps(counted))
        )

    while step < TOTAL:
        if runtime.should_stop():
            save()
            sys.exit(143)
        step += 1
        counted.append(step)
        time.sleep(PAUSE)
        runtime.progress(step, total=TOTAL)
        if step % EVERY == 0 or step == TOTAL:
            save()
    assert counted == list(range(1, TOTAL + 1)), counted
    print("counted", len(counted))


main()

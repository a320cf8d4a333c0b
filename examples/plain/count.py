"""Counts primes, and survives the loss of its machine without knowing anything of tpufleet.

It needs to be told one thing: a folder that outlives the machine. The rest are old habits: write
a checkpoint now and then, never half of one, and start from the newest.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

CHUNKS, CHUNK = 40, 500  # the work: 40 chunks of 500 numbers each
PAUSE = float(os.environ.get("PAUSE", "0.1"))  # as if a chunk were more work than it is
KEEP = 3

folder = Path(os.environ.get("TPUFLEET_CHECKPOINT_DIR", "checkpoints"))
told_to_stop = False


def remember(*_: object) -> None:
    global told_to_stop
    told_to_stop = True


def is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, int(number**0.5) + 1))


def checkpoints() -> list[Path]:
    """Oldest first. The number in the name is how tpufleet sees progress, too."""
    return sorted(folder.glob("step_*.json"))


def save(step: int, found: int) -> None:
    """Under its own name only once it is whole: a reader never sees half a checkpoint."""
    draft = folder / ".draft"
    draft.write_text(json.dumps({"step": step, "found": found}))
    draft.rename(folder / f"step_{step:06d}.json")
    for old in checkpoints()[:-KEEP]:
        old.unlink()


def main() -> None:
    signal.signal(signal.SIGTERM, remember)
    folder.mkdir(parents=True, exist_ok=True)
    step = found = 0
    if saved := checkpoints():
        newest = json.loads(saved[-1].read_text())
        step, found = newest["step"], newest["found"]
    print(f"starting at chunk {step} with {found} primes", flush=True)
    while step < CHUNKS:
        found += sum(is_prime(number) for number in range(step * CHUNK, (step + 1) * CHUNK))
        step += 1
        time.sleep(PAUSE)
        if told_to_stop or step % 5 == 0:
            save(step, found)
        if told_to_stop:
            sys.exit(f"told to stop after chunk {step}")  # not 0: the work is not done
    (folder / "result.txt").write_text(f"{found}\n")
    print(f"{found} primes below {CHUNKS * CHUNK}", flush=True)


if __name__ == "__main__":
    main()

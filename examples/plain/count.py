"""Count primes and survive preemptions, without importing tpufleet.

It only needs a folder that survives the machine: it saves atomic checkpoints there and resumes from
the newest one.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

CHUNKS, CHUNK = 40, 500  # the work: 40 chunks of 500 numbers each
PAUSE = float(os.environ.get("PAUSE", "0.1"))  # simulates more work per chunk
KEEP = 3

folder = Path(os.environ.get("TPUFLEET_CHECKPOINT_DIR", "checkpoints"))
stop_requested = False


def on_sigterm(*_: object) -> None:
    global stop_requested
    stop_requested = True


def is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, int(number**0.5) + 1))


def checkpoints() -> list[Path]:
    """Oldest first. tpufleet also reads the progress from the number in the name."""
    return sorted(folder.glob("step_*.json"))


def save(step: int, primes: int) -> None:
    """Write a draft, then rename it: a reader never sees a partial checkpoint."""
    draft = folder / ".draft"
    draft.write_text(json.dumps({"step": step, "primes": primes}))
    draft.rename(folder / f"step_{step:06d}.json")
    for old in checkpoints()[:-KEEP]:
        old.unlink()


def main() -> None:
    signal.signal(signal.SIGTERM, on_sigterm)
    folder.mkdir(parents=True, exist_ok=True)
    step = primes = 0
    if saved := checkpoints():
        newest = json.loads(saved[-1].read_text())
        step, primes = newest["step"], newest["primes"]
    print(f"starting at chunk {step} with {primes} primes", flush=True)
    while step < CHUNKS:
        primes += sum(is_prime(number) for number in range(step * CHUNK, (step + 1) * CHUNK))
        step += 1
        time.sleep(PAUSE)
        if stop_requested or step % 5 == 0:
            save(step, primes)
        if stop_requested:
            sys.exit(f"stopped after chunk {step}")  # not 0: the job is not complete
    (folder / "result.txt").write_text(f"{primes}\n")
    print(f"{primes} primes below {CHUNKS * CHUNK}", flush=True)


if __name__ == "__main__":
    main()

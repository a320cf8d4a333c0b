"""A fixed loop, timed beside every benchmark, so that runs on different machines compare.

Pure Python on purpose: dicts, small objects, sorting and text, as our own hot paths are.
"""

from __future__ import annotations

import json
import time


def loop() -> int:
    """Always the same work. Changing it makes all older figures worthless."""
    counts: dict[str, int] = {}
    pairs: list[tuple[int, str]] = []
    number = 12345
    for _ in range(100_000):
        number = (number * 1103515245 + 12345) % 2147483648
        name = f"host-{number % 997}"
        counts[name] = counts.get(name, 0) + 1
        pairs.append((number, name))
    pairs.sort()
    return sum(counts.values()) + pairs[0][0]


def milliseconds(rounds: int = 5) -> float:
    """CPU time of the loop: the best of a few rounds, for other programs only ever slow it."""
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        loop()
        best = min(best, time.process_time() - began)
    return best * 1000


if __name__ == "__main__":
    print(json.dumps({"yardstick_ms": round(milliseconds(), 2)}))

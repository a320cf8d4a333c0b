"""The model shape, timing and operation count of the `extract_gpu` benchmark."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable

SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
}
LENGTH = 2048
ROWS = 16
SIDE = 8192  # of the square matrices whose product is the limit
BATCHES = {1: 240, 4: 60}  # for each number of layers: enough for several seconds
TOY = bool(os.environ.get("EXTRACT_BENCH_TOY"))  # to try the script itself, on any machine
if TOY:
    SHAPE |= {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 99,
    }
    LENGTH, ROWS, SIDE, BATCHES = 64, 4, 128, {1: 12, 4: 6}
WIDTH = SHAPE["hidden_size"]
WORK = (
    "operations of one token: 2 x (weights of the layers, without embedding and head) + "
    "4 x heads x head size x (length + 1) / 2 for each layer, the causal half of attention"
)


def median_seconds(action: Callable[[], None], *, warm: int = 3, repeat: int = 10) -> float:
    for _ in range(warm):
        action()
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def paces(step: Callable[[], object], finish: Callable[[object], None]) -> dict[str, float]:
    """Seconds of a step, over a window of a tenth of a second that follows a rest, and over two
    seconds without a rest. A chip that is held to a number of watts is faster in the first; what is
    compared must be taken over the same window."""
    finish(step())
    each = median_seconds(lambda: finish(step()), warm=2, repeat=3)
    if TOY:
        return {"rested": each, "lasting": each}

    def window(seconds: float) -> float:
        count = max(round(seconds / each), 2)
        began = time.perf_counter()
        for _ in range(count - 1):
            step()
        finish(step())
        return (time.perf_counter() - began) / count

    rested = []
    for _ in range(3):
        time.sleep(0.5)
        rested.append(window(0.1))
    window(0.5)
    return {"rested": statistics.median(rested), "lasting": window(2.0)}


def emit(facts: dict) -> None:
    """Print results so far; the last line counts, so a killed child still reports something."""
    print("FACTS " + json.dumps(facts), flush=True)

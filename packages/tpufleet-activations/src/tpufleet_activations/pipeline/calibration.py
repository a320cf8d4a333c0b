"""How a worker uses its devices: tokens of a batch, batches in flight.

Chosen by a short measurement on the devices. An earlier run's is used where there is one, and what
takes long to compile is tried only in runs that take much longer. The order and the layout of what
is stored do not depend on it, but its rounding may: workers of one dataset that have the same
devices use the same batches.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tpufleet.errors import BadInput, NotFound
from tpufleet.runtime.object_store import ObjectStore
from tpufleet_activations import plans
from tpufleet_activations.io import dtypes
from tpufleet_activations.model import engines
from tpufleet_activations.model.host_memory import GPUS
from tpufleet_activations.pipeline import batches, preparation

log = logging.getLogger(__name__)

# Other sizes are tried in runs longer than this: each is compiled, on GPUs for some ten seconds.
# The next run with this model and chip knows their rates.
LONG_RUN_SECONDS, LONG_ON_GPUS = 600.0, 200.0
# A smaller batch is chosen if it is this close to the best rate: it takes less memory.
CLOSE = 0.99
# Batches are timed for so long, after half as long without a rest: a chip that is held to a number
# of watts is faster in the first second.
SUSTAINED_SECONDS = 2.0
LARGEST_PACKED = 131_072  # tokens of a packed batch that are tried
# Devices have as much work ahead as the host may be busy with something else.
AHEAD_SECONDS = 0.1
FEWEST_IN_FLIGHT, MOST_IN_FLIGHT = 2, 8
IN_FLIGHT = 3  # while batches are timed
MEMORY_SHARE = 0.1  # of the host's memory, for batches in flight


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The choice. `rates` are tokens per second of full batches, by tokens of a batch."""

    batch_tokens: int
    origin: str  # "plan", "dataset" (chosen by another worker), "measured"
    rates: Mapping[int, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.rates.get(self.batch_tokens, 0.0)

    def batches_in_flight(self, default: int, token_bytes: float, host_bytes: float) -> int:
        """So many that the devices always have work, and that fit the host's memory."""
        wanted = default
        if self.tokens_per_second:
            wanted = math.ceil(AHEAD_SECONDS * self.tokens_per_second / self.batch_tokens)
        fitting = int(MEMORY_SHARE * host_bytes / max(self.batch_tokens * token_bytes, 1))
        return max(FEWEST_IN_FLIGHT, min(wanted, fitting, MOST_IN_FLIGHT))

    def to_json(self) -> dict[str, Any]:
        return {
            "batch_tokens": self.batch_tokens,
            "origin": self.origin,
            "rates": {str(size): round(rate) for size, rate in self.rates.items()},
            "seconds": round(self.seconds, 2),
        }


def calibrate(
    engine: engines.Engine,
    plan: plans.ExtractionPlan,
    objects: ObjectStore,
    *,
    force: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Choose for this worker. `force`: measure again, and try other sizes in a short run too."""
    began = clock()
    name = f"calibration/{_slug(engine.device_kind)}.json"
    chosen = _stored(objects, name)
    if chosen is not None:
        return Calibration(batch_tokens=chosen, origin="dataset")

    def measure(size: int) -> float:
        """0 if such batches do not fit the devices' memory."""
        batch = typical_batch(
            plan, size, engine.vocabulary, varlen=engine.varlen, multiple=engine.row_multiple
        )
        shape = (batch.tokens.shape, batch.segments is not None)
        rate = lambda: _rate(engine, batch, clock)
        return float(engine.finding(("sustained rate", shape), rate, renew=force))

    size = starting_size(plan, varlen=engine.varlen)
    rates = {size: measure(size)}
    while not rates[size]:
        size //= 2
        if size < batches.SMALLEST_BATCH:
            raise BadInput(
                f"not even {2 * size:,} tokens at a time fit the memory of {engine.device_kind}; "
                "use --mesh fsdp=N or tensor=N to divide the model over devices, or fewer sites"
            )
        log.warning("batches of %d tokens do not fit the devices; trying %d", 2 * size, size)
        rates[size] = measure(size)
    tokens = plan.estimate.get("tokens", 0)
    long = LONG_ON_GPUS if engine.platform in GPUS else LONG_RUN_SECONDS
    if plan.estimate.get("default_batch") and (force or tokens / rates[size] > long):
        shapes = 1 if packs(plan, varlen=engine.varlen) else len(plan.buckets)
        for factor in (2, 0.5):
            other = int(size * factor)
            while worth_trying(other, tokens, shapes):
                fastest = max(rates.values())
                rates[other] = measure(other)
                if CLOSE * rates[other] < fastest:
                    break
                other = int(other * factor)  # further in the direction that is faster
            if CLOSE * max(rates.values()) > rates[size]:
                break
    size = choose(rates)
    record = json.dumps({"batch_tokens": size}).encode()
    if size != plan.batch_tokens and not objects.create(name, record):
        size = _stored(objects, name) or size
    return Calibration(batch_tokens=size, origin="measured", rates=rates, seconds=clock() - began)


def choose(rates: Mapping[int, float]) -> int:
    """The smallest batch that is hardly slower than the fastest."""
    best = max(rates.values())
    return min(size for size, rate in rates.items() if rate >= CLOSE * best)


def packs(plan: plans.ExtractionPlan, *, varlen: bool) -> bool:
    """Whether all batches have one shape, with hardly any padding."""
    buckets = preparation.plan_buckets(plan)
    return batches.resolve_batching(plan.batching, buckets, varlen=varlen) == "varlen"


def starting_size(plan: plans.ExtractionPlan, *, varlen: bool) -> int:
    """Tokens of a batch, before anything is measured. The plan's are for as many shapes as it has
    buckets. Of one shape, a single batch is incomplete, which costs less than to compile another
    program for a small dataset."""
    if not (plan.estimate.get("default_batch") and packs(plan, varlen=varlen)):
        return plan.batch_tokens
    size = batches.LARGEST_BATCH
    while size > batches.SMALLEST_BATCH and 2 * size > plan.estimate.get("tokens", 0):
        size //= 2
    return size


def worth_trying(size: int, tokens: float, shapes: int) -> bool:
    """Whether incomplete batches are a small part of the work."""
    largest = LARGEST_PACKED if shapes == 1 else 2 * batches.LARGEST_BATCH
    few = size * shapes / 2 <= batches.INCOMPLETE_SHARE * tokens
    return batches.SMALLEST_BATCH <= size <= largest and (few or size < batches.LARGEST_BATCH)


def typical_batch(
    plan: plans.ExtractionPlan, size: int, vocabulary: int, *, varlen: bool, multiple: int
) -> batches.Batch:
    """A full batch of a size, with samples as long as those of the plan. Its tokens are random: a
    chip that is held to a number of watts multiplies equal rows faster than those of a text."""
    buckets = preparation.plan_buckets(plan)
    batching = batches.resolve_batching(plan.batching, buckets, varlen=varlen)
    mean = plan.estimate.get("tokens", 0) / max(plan.samples, 1) or buckets[-1]
    length = buckets[min(int(np.searchsorted(buckets, mean)), len(buckets) - 1)]
    if batching == "pack":
        length = buckets[-1]
    elif batching == "varlen":
        length = min(math.ceil(mean), buckets[-1])
    chance = np.random.default_rng(0)
    tokens = [
        chance.integers(0, vocabulary, length, np.int32) for _ in range(size // length + multiple)
    ]
    return next(
        batches.make_batches(
            tokens, batching=batching, buckets=buckets, batch_tokens=size, row_multiple=multiple
        )
    )


def host_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def token_bytes(plan: plans.ExtractionPlan) -> int:
    """Of the activations of one token."""
    return dtypes.bytes_per_token(plan.widths, plan.dtype)


def _rate(engine: engines.Engine, batch: batches.Batch, clock: Callable[[], float]) -> float:
    try:
        engine.start(batch)()  # compiles
        # The page-locked memory of batches in flight is allocated once, which takes longer than
        # they do.
        _finish([engine.start(batch) for _ in range(IN_FLIGHT)])
        _sustained(engine, batch, SUSTAINED_SECONDS / 2, clock)
        return _sustained(engine, batch, SUSTAINED_SECONDS, clock)
    except Exception as error:
        if engine.is_out_of_memory(error):
            return 0.0
        raise


def _sustained(
    engine: engines.Engine, batch: batches.Batch, seconds: float, clock: Callable[[], float]
) -> float:
    """Tokens per second, always with as many batches in flight."""
    began, done = clock(), 0
    started = deque(engine.start(batch) for _ in range(IN_FLIGHT))
    while started:
        started.popleft()()
        done += 1
        if clock() - began < seconds:
            started.append(engine.start(batch))
    return done * batch.real_tokens / max(clock() - began, 1e-9)


def _finish(started: Sequence[Callable[[], Any]]) -> None:
    for fetch in started:
        fetch()


def _stored(objects: ObjectStore, name: str) -> int | None:
    try:
        return int(json.loads(objects.read(name))["batch_tokens"])
    except NotFound:
        return None


def _slug(kind: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", kind).strip("-")

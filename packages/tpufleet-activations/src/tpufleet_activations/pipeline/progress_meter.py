"""Progress of a worker: samples, tokens per second, utilization, queues, bottleneck, time left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpufleet.runtime.units import HeldUnit
from tpufleet_activations import formatting, plans
from tpufleet_activations.pipeline import batches, preparation, stages
from tpufleet_activations.start_times import StartTimes

EXPECTED_UTILIZATION = 0.4


class Meter:
    """Counts of this worker, and of what others had committed when it started; at the end of a run
    also of what they have committed since."""

    def __init__(
        self,
        plan: plans.ExtractionPlan,
        *,
        samples_before: int = 0,
        peak: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        start: StartTimes | None = None,
    ):
        self.plan, self.peak, self._clock = plan, peak, clock
        self._start = start or StartTimes(clock)
        self.samples_before = samples_before
        self.samples = self.units = self.skipped = self.fenced = 0
        self.tokens = self.batches = 0
        self._real_tokens = self._computed_tokens = 0  # with those of the first batch
        self.programs, self.compile_seconds = 0, 0.0
        self.calibrated: dict[str, Any] = {}  # see `calibration.Calibration`
        self._operations = 0.0
        self._lock = threading.Lock()  # several threads commit units
        self._began: float | None = None
        self._first_arrived: float | None = None
        self._pipeline: stages.Pipeline | None = None
        self._queues: Mapping[str, stages.StageQueue] = {}
        self.claimed = 0  # units that this worker has begun
        # What this worker could not claim, because others hold it.
        self.waiting_for: Sequence[HeldUnit] = ()

    def attach(self, pipeline: stages.Pipeline, queues: Mapping[str, stages.StageQueue]) -> None:
        self._pipeline, self._queues = pipeline, queues

    def started(self, batch: batches.Batch) -> None:
        """The batch was given to the devices, which may take long for it."""
        if self._began is None:  # the first batch has been compiled
            self._began = self._clock()
        self._real_tokens += batch.real_tokens
        self._computed_tokens += batch.tokens.size
        self.batches += 1

    def arrived(self, batch: batches.Batch, operations: float) -> None:
        """The activations are on the host. Rates count from the first such batch on."""
        if self._first_arrived is None:
            self._first_arrived = self._clock()
        else:
            self._operations += operations
            self.tokens += batch.real_tokens

    def compiled(self, programs: int, seconds: float) -> None:
        """Programs compiled so far, and how long batches have waited for them."""
        self.programs, self.compile_seconds = programs, seconds

    def units_per_second(self) -> float:
        """Units committed per second; before the first, what the devices' peak suggests; 0 if that
        is unknown."""
        seconds, operations = self.seconds(), self.plan.estimate.get("operations")
        if self.units and seconds:
            return self.units / seconds
        if self.peak and operations:
            return EXPECTED_UTILIZATION * self.peak * self.plan.units / operations
        return 0.0

    def committed(self, prepared: preparation.PreparedUnit) -> None:
        with self._lock:
            self.units += 1
            self.samples += len(prepared.samples)
            self.skipped += sum(not len(sample.tokens) for sample in prepared.samples)

    def recount(self, samples: int) -> None:
        """With the samples that all workers have committed so far."""
        with self._lock:
            self.samples_before = max(samples - self.samples, 0)

    @property
    def complete(self) -> bool:
        """Whether every sample is committed, as far as this worker knows."""
        return self.samples_before + self.samples >= self.plan.samples

    def seconds(self) -> float:
        return 0.0 if self._began is None else self._clock() - self._began

    def start_seconds(self) -> float | None:
        """Until the first batch was given to the devices; None before."""
        return None if self._began is None else self._began - self._start.began

    def tokens_per_second(self) -> float | None:
        """None until the second batch has arrived."""
        seconds = self._seconds_since_first_arrival()
        return self.tokens / seconds if self.tokens and seconds else None

    def _seconds_since_first_arrival(self) -> float:
        return 0.0 if self._first_arrived is None else self._clock() - self._first_arrived

    def padding(self) -> float | None:
        """The share of computed tokens that are padding. None before the first batch."""
        return 1 - self._real_tokens / self._computed_tokens if self._computed_tokens else None

    def utilization(self) -> float | None:
        """Fraction of the devices' peak, counting only the operations of real tokens. None while
        the rate is unknown."""
        seconds = self._seconds_since_first_arrival()
        if self.peak is None or not self._operations or not seconds:
            return None
        return self._operations / seconds / self.peak

    def bottleneck(self) -> str:
        """The busiest stage, or "compute" if every other stage is mostly idle. Empty until the
        second batch has arrived."""
        if self._pipeline is None or not self.tokens:
            return ""
        busiest = max(self._pipeline.stages, key=lambda stage: stage.busy_seconds)
        if busiest.name == "fetch" or busiest.busy_seconds < 0.5 * self.seconds():
            return "compute"
        return busiest.name

    def stage_seconds(self) -> dict[str, float]:
        """Busy seconds of each stage, averaged over its threads."""
        stages = [] if self._pipeline is None else self._pipeline.stages
        return {stage.name: stage.busy_seconds for stage in stages}

    def seconds_left(self) -> float | None:
        """Assuming that no other worker helps. None if it depends on other workers."""
        if self._waiting():
            return None
        left = self.plan.samples - self.samples_before - self.samples
        seconds = self.seconds()
        return left * seconds / self.samples if self.samples and seconds else None

    def _waiting(self) -> Sequence[HeldUnit]:
        """What this worker waits for: nothing, as long as it has units of its own."""
        return self.waiting_for if self.claimed <= self.units + self.fenced else ()

    def snapshot(self) -> dict[str, Any]:
        return {
            "samples": self.samples_before + self.samples,
            "total": self.plan.samples,
            "units": self.units,
            "skipped": self.skipped,
            "fenced": self.fenced,
            "tokens_per_second": self.tokens_per_second(),
            "padding": self.padding(),
            "programs": self.programs,
            "compile_seconds": self.compile_seconds,
            "calibration": dict(self.calibrated),
            "start_seconds": self.start_seconds(),
            "start": dict(self._start.parts),
            "mfu": self.utilization(),
            "queues": {name: queue.depth() for name, queue in self._queues.items()},
            "limit": self.bottleneck(),
            "busy_seconds": {name: round(busy, 2) for name, busy in self.stage_seconds().items()},
            "seconds_left": self.seconds_left(),
            "waiting": formatting.format_waiting(self._waiting()),
        }

"""How an extraction is going: samples, tokens a second, utilisation, queues, limit, time left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tpufleet.workloads.activations import plans
from tpufleet.workloads.activations.pipeline import batches, preparation, stages


class Meter:
    """Counts of this worker, beside what all workers had committed when it began."""

    def __init__(
        self,
        plan: plans.ExtractionPlan,
        *,
        samples_before: int = 0,
        peak: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.plan, self.peak, self._clock = plan, peak, clock
        self.samples_before = samples_before
        self.samples = self.units = self.skipped = self.fenced = 0
        self.tokens = self.padded_tokens = self.batches = 0
        self._operations = 0.0
        self._lock = threading.Lock()  # units are committed by several threads
        self._began: float | None = None
        self._line: stages.Pipeline | None = None
        self._belts: Mapping[str, stages.StageQueue] = {}

    def attach(self, line: stages.Pipeline, belts: Mapping[str, stages.StageQueue]) -> None:
        self._line, self._belts = line, belts

    def computed(self, batch: batches.Batch, operations: float) -> None:
        if self._began is None:  # compilation of the first batch is over by now
            self._began = self._clock()
        else:
            self._operations += operations
            self.tokens += batch.real_tokens
            self.padded_tokens += batch.tokens.size
        self.batches += 1

    def committed(self, prepared: preparation.PreparedUnit) -> None:
        with self._lock:
            self.units += 1
            self.samples += len(prepared.samples)
            self.skipped += sum(not len(sample.tokens) for sample in prepared.samples)

    def seconds(self) -> float:
        return 0.0 if self._began is None else self._clock() - self._began

    def tokens_per_second(self) -> float:
        seconds = self.seconds()
        return self.tokens / seconds if seconds else 0.0

    def utilisation(self) -> float | None:
        """Of the devices' peak rate, counting only what real tokens need."""
        seconds = self.seconds()
        if self.peak is None or not seconds:
            return None
        return self._operations / seconds / self.peak

    def bottleneck(self) -> str:
        """The busiest stage; the devices, when every other stage is mostly idle."""
        if self._line is None or not self.seconds():
            return ""
        busiest = max(self._line.stages, key=lambda stage: stage.busy_seconds)
        if busiest.name == "fetch" or busiest.busy_seconds < 0.5 * self.seconds():
            return "compute"
        return busiest.name

    def seconds_left(self) -> float | None:
        """If no other worker helped."""
        left = self.plan.samples - self.samples_before - self.samples
        seconds = self.seconds()
        return left * seconds / self.samples if self.samples and seconds else None

    def snapshot(self) -> dict[str, Any]:
        return {
            "samples": self.samples_before + self.samples,
            "total": self.plan.samples,
            "units": self.units,
            "skipped": self.skipped,
            "fenced": self.fenced,
            "tokens_per_second": self.tokens_per_second(),
            "padding": 1 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0,
            "mfu": self.utilisation(),
            "queues": {name: belt.depth() for name, belt in self._belts.items()},
            "limit": self.bottleneck(),
            "seconds_left": self.seconds_left(),
        }

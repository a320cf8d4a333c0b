"""One worker: claims units, runs them through the model, writes and commits them, all overlapped.

prepare → compute → fetch → write → commit: five stages joined by bounded queues, so the devices
never wait for a disk and memory stays bounded when a disk is slow. Threads beside them hash and
write, pieces of several shards at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tpufleet.errors import Fenced
from tpufleet.runtime.units import Claim, Units
from tpufleet.workloads.activations import plans
from tpufleet.workloads.activations.io import shard_writer, unit_writer
from tpufleet.workloads.activations.io.storage import Storage
from tpufleet.workloads.activations.model import engines
from tpufleet.workloads.activations.pipeline import batches, preparation, stages
from tpufleet.workloads.activations.pipeline.progress_meter import Meter


class Coordinator(Protocol):
    """Who decides what is run: see `gangs`."""

    part: int
    parts: int

    def claims(self) -> Iterator[Claim | None]: ...

    def should_stop(self) -> bool: ...

    def commit(self, claim: Claim, file: Mapping[str, Any], record: Callable[..., Any]) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """How much is done at once. None of it changes what is written."""

    preparers: int = 0  # processes that tokenise; 0: a thread
    prefetch_units: int = 2  # units prepared before they are needed
    batches_in_flight: int = 2  # batches on the devices
    batches_fetched: int = 2  # batches in host memory, waiting to be written
    writers: int = 8  # threads that hash and write
    backlog: int = 64  # pieces that wait for a writer
    committers: int = 2  # units that are made durable and committed at once


@dataclass(frozen=True, slots=True)
class _Step:
    """A batch on its way. `fetch` is None at a unit's end; `drop` then says not to commit it."""

    claim: Claim
    prepared: preparation.PreparedUnit
    batch: batches.Batch | None = None
    fetch: Callable[[], list[engines.OutputBlock]] | None = None
    blocks: Sequence[engines.OutputBlock] = ()
    drop: bool = False


class Worker:
    def __init__(
        self,
        storage: Storage,
        plan: plans.ExtractionPlan,
        engine: engines.Engine,
        coordinator: Coordinator,
        *,
        meter: Meter | None = None,
        options: WorkerOptions = WorkerOptions(),  # noqa: B008
    ):
        self._storage, self._plan, self._engine, self._crew = storage, plan, engine, coordinator
        self._options = options
        self.meter = meter or Meter(plan, peak=engine.peak_flops())
        self._recorder: unit_writer.UnitWriter | None = None  # of the unit being written
        self._unfinished: set[unit_writer.UnitWriter] = set()
        self._writers = shard_writer.WriterPool(options.writers, options.backlog)

    def run(self, on_progress: Callable[[Meter], None] = lambda meter: None) -> Meter:
        """Work until every unit is committed, or until asked to stop."""
        line, options = stages.Pipeline(), self._options
        preparers = preparation.PreparerPool(
            self._plan, self._engine.row_multiple, options.preparers
        )
        ready, computed, fetched, written = (
            stages.StageQueue(line, size)
            for size in (1, options.batches_in_flight, options.batches_fetched, 1)
        )
        self.meter.attach(
            line, {"ready": ready, "computed": computed, "fetched": fetched, "written": written}
        )
        stages.Stage(line, "prepare", _await, self._submitted(line, preparers), ready).start()
        stages.Stage(line, "fetch", _fetch, computed, fetched).start()
        stages.Stage(line, "write", self._write, fetched, written).start()
        stages.Stage(line, "commit", self._commit, written, None, options.committers).start()
        try:
            self._compute(ready, computed, on_progress)
            line.join()
        except stages.PipelineStopped:
            line.check()
        except BaseException as error:
            line.fail(error)
            raise
        finally:
            line.wait()
            preparers.close()
            for recorder in self._unfinished:
                recorder.abandon()
            self._writers.close()
        on_progress(self.meter)
        return self.meter

    def _submitted(
        self, line: stages.Pipeline, preparers: preparation.PreparerPool
    ) -> Iterator[tuple[Claim, Future[preparation.PreparedUnit]]]:
        waiting: deque[tuple[Claim, Future[preparation.PreparedUnit]]] = deque()
        for claim in self._crew.claims():
            if line.failed:
                return
            if claim is not None:
                waiting.append((claim, preparers.submit(claim.unit)))
            while waiting and (claim is None or len(waiting) >= self._options.prefetch_units):
                yield waiting.popleft()
        yield from waiting

    def _compute(
        self,
        ready: stages.StageQueue,
        computed: stages.StageQueue,
        on_progress: Callable[[Meter], None],
    ) -> None:
        units = iter(ready)
        for claim, prepared in units:
            for batch in prepared.batches:
                if self._crew.should_stop():
                    break
                fetch = self._engine.start(batch)
                computed.put(_Step(claim, prepared, batch, fetch))
                self.meter.computed(batch, self._engine.flops(batch))
                on_progress(self.meter)
            stop = self._crew.should_stop()
            computed.put(_Step(claim, prepared, drop=stop))
            if stop:
                break
        for _ in units:
            pass  # what was made ready after the stop is left to others
        computed.close()

    def _write(self, step: _Step) -> Any:
        if self._recorder is None:
            self._recorder = self._open(step)
            self._unfinished.add(self._recorder)
        if step.batch is None:
            recorder, self._recorder = self._recorder, None
            if not step.drop:
                return step, recorder
            recorder.abandon()
            self._unfinished.discard(recorder)
            return None
        for block in step.blocks:
            self._append(self._recorder, step.batch, block)
        return None

    def _open(self, step: _Step) -> unit_writer.UnitWriter:
        prepared, part = step.prepared, self._crew.part
        rows = [self._engine.rows(len(batch.tokens)) for batch in prepared.batches]
        samples = prepared.stored_samples(rows, include_skipped=part == 0)
        return unit_writer.UnitWriter(
            self._storage, self._plan, step.claim, samples, part=part, executor=self._writers
        )

    def _append(
        self, recorder: unit_writer.UnitWriter, batch: batches.Batch, block: engines.OutputBlock
    ) -> None:
        height = next(iter(block.values.values())).shape[0]
        mine = [
            place
            for place in batch.spans
            if block.first_row <= place.row < block.first_row + height
        ]
        if not mine:
            return
        for name, values in block.values.items():
            recorder.append(name, *_parts(values, mine, block.first_row))

    def _commit(self, item: tuple[_Step, unit_writer.UnitWriter]) -> None:
        step, recorder = item
        unit = step.claim.unit
        file = recorder.finish()
        self._unfinished.discard(recorder)
        try:
            self._crew.commit(
                step.claim,
                file,
                lambda files: unit_writer.commit_outcome(
                    self._plan, unit, files, self._engine.compute_type
                ),
            )
        except Fenced:
            # Another worker has the unit now; what was written here is waste.
            self._storage.delete(file["name"])
            self.meter.fenced += 1
            return
        self.meter.committed(step.prepared)


class HeartbeatThread:
    """Beats for a worker in the background, so that its units are not taken over."""

    def __init__(self, units: Units, every: float):
        self._units, self._every = units, every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="extract-heart", daemon=True)

    def __enter__(self) -> HeartbeatThread:
        self._units.heartbeat()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._units.leave()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self._units.heartbeat()
            except Exception as error:
                # A missed beat costs at most a unit; the next one may get through.
                print(f"heartbeat failed: {error}", flush=True)


def _await(
    item: tuple[Claim, Future[preparation.PreparedUnit]],
) -> tuple[Claim, preparation.PreparedUnit]:
    return item[0], item[1].result()


def _fetch(step: _Step) -> _Step:
    if step.fetch is None:
        return step
    return _Step(step.claim, step.prepared, step.batch, None, step.fetch())


def _parts(
    values: np.ndarray, places: Sequence[batches.SampleSpan], first: int
) -> list[np.ndarray]:
    """The real tokens of [rows, length, …], one after the other, without copying them."""
    length = values.shape[1]
    if all(place.length == length for place in places):
        return [values[: len(places)].reshape(-1, *values.shape[2:])]
    return [values[place.row - first, place.start : place.start + place.length] for place in places]

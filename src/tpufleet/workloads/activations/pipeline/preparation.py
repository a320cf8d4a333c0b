"""Preparing units for the model: read, tokenize, batch. Imports no JAX: it runs in subprocesses."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from tpufleet.workloads.activations import plans
from tpufleet.workloads.activations.inputs import sources, tokenization
from tpufleet.workloads.activations.inputs.samples import TokenizedSample
from tpufleet.workloads.activations.io.unit_writer import StoredSample
from tpufleet.workloads.activations.pipeline import batches
from tpufleet.workloads.activations.pipeline.locations import Locations


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedUnit:
    """The tokenized samples of a unit, and their batches."""

    unit: int
    samples: tuple[TokenizedSample, ...]
    batches: tuple[batches.Batch, ...]

    def stored_samples(
        self, rows: Sequence[frozenset[int]], *, include_skipped: bool
    ) -> list[StoredSample]:
        """The samples in the order in which a process that holds `rows[batch]` of each batch
        writes them. `include_skipped` appends the samples without tokens."""
        order = [
            span.sample
            for batch, kept in zip(self.batches, rows, strict=True)
            for span in batch.spans
            if span.row in kept
        ]
        if include_skipped:
            order += [n for n, sample in enumerate(self.samples) if not len(sample.tokens)]
        return [
            StoredSample(
                sample=self.samples[n].index,
                tokens=self.samples[n].tokens,
                positions=np.arange(len(self.samples[n].tokens), dtype=np.int32),
                metadata=self.samples[n].metadata,
            )
            for n in order
        ]


class UnitPreparer:
    """Prepares units of one plan; opens the data and the tokenizer once."""

    def __init__(self, plan: plans.ExtractionPlan, locations: Locations, row_multiple: int):
        self._plan, self._row_multiple = plan, row_multiple
        self._source = sources.PlannedSource(locations.data, plan.seed, plan.data_digest)
        self._tokenizer = tokenization.Tokenizer(locations.tokenizer, plan.chat_date)
        self._vocabulary = locations.architecture.vocabulary

    def prepare(self, unit: int) -> PreparedUnit:
        plan = self._plan
        samples = tokenization.tokenize(
            self._source.read(plan.sample_range(unit)),
            self._tokenizer,
            max_length=plan.max_length,
            too_long=plan.too_long,
            vocabulary=self._vocabulary,
        )
        unit_batches = batches.make_batches(
            [sample.tokens for sample in samples],
            batching=plan.batching,
            buckets=plan.buckets or batches.buckets_up_to(plan.max_length),
            batch_tokens=plan.batch_tokens,
            row_multiple=self._row_multiple,
        )
        return PreparedUnit(unit=unit, samples=tuple(samples), batches=tuple(unit_batches))


class PreparerPool:
    """Prepares units ahead of the model, in subprocesses or (with 0 processes) in one thread."""

    def __init__(
        self,
        plan: plans.ExtractionPlan,
        locations: Locations,
        row_multiple: int,
        processes: int = 0,
    ):
        self._local = None if processes else UnitPreparer(plan, locations, row_multiple)
        self._pool: Executor
        if processes:
            # Spawned: forking a process that runs JAX's threads can deadlock.
            self._pool = ProcessPoolExecutor(
                processes,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_initialize,
                initargs=(plan.to_json(), locations, row_multiple),
            )
        else:
            self._pool = ThreadPoolExecutor(1)

    def submit(self, unit: int) -> Future[PreparedUnit]:
        prepare = _prepare if self._local is None else self._local.prepare
        return self._pool.submit(prepare, unit)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


_preparer: UnitPreparer | None = None  # set in the subprocesses of a pool


def _initialize(plan: bytes, locations: Locations, row_multiple: int) -> None:
    global _preparer
    _preparer = UnitPreparer(plans.from_json(plan), locations, row_multiple)


def _prepare(unit: int) -> PreparedUnit:
    assert _preparer is not None
    return _preparer.prepare(unit)

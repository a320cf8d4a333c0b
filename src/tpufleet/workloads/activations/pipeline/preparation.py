"""Making a unit ready to run: read, tokenise, batch. No JAX here: other processes do it too."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from tpufleet.workloads.activations import inputs, plans, tokenizing
from tpufleet.workloads.activations.io import remote_files
from tpufleet.workloads.activations.io.unit_writer import StoredSample
from tpufleet.workloads.activations.model import architectures
from tpufleet.workloads.activations.pipeline import batches
from tpufleet.workloads.activations.samples import SampleSource, TokenizedSample


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedUnit:
    """A unit's samples and their batches, ready for the model."""

    unit: int
    samples: tuple[TokenizedSample, ...]
    batches: tuple[batches.Batch, ...]

    def stored_samples(
        self, rows: Sequence[frozenset[int]], *, include_skipped: bool
    ) -> list[StoredSample]:
        """The samples in the order in which their rows are written by a process that holds
        `rows[batch]` of each batch. `rest` adds the samples that have no tokens."""
        order = [
            place.sample
            for batch, mine in zip(self.batches, rows, strict=True)
            for place in batch.spans
            if place.row in mine
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

    def __init__(self, plan: plans.ExtractionPlan, multiple: int):
        self._plan, self._multiple = plan, multiple
        self._source: SampleSource = inputs.open_source(plan.data, plan.seed)
        self._tokenizer = tokenizing.Tokenizer(remote_files.model_folder(plan.tokenizer))
        model = remote_files.model_folder(plan.model)
        self._vocabulary = architectures.from_folder(model).vocabulary

    def prepare(self, unit: int) -> PreparedUnit:
        plan = self._plan
        samples = tokenizing.tokenize(
            self._source.read(plan.sample_range(unit)),
            self._tokenizer,
            max_length=plan.max_length,
            too_long=plan.too_long,
            vocabulary=self._vocabulary,
        )
        cut = batches.make_batches(
            [sample.tokens for sample in samples],
            batching=plan.batching,
            buckets=plan.buckets or batches.buckets_up_to(plan.max_length),
            batch_tokens=plan.batch_tokens,
            row_multiple=self._multiple,
        )
        return PreparedUnit(unit=unit, samples=tuple(samples), batches=tuple(cut))


class PreparerPool:
    """Some processes, or one thread, that prepare units ahead of the model."""

    def __init__(self, plan: plans.ExtractionPlan, multiple: int, processes: int = 0):
        self._local = None if processes else UnitPreparer(plan, multiple)
        self._pool: Executor
        if processes:
            # A fresh interpreter: forking a process that runs JAX's threads can lock up.
            self._pool = ProcessPoolExecutor(
                processes,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_open,
                initargs=(plan.to_json(), multiple),
            )
        else:
            self._pool = ThreadPoolExecutor(1)

    def submit(self, unit: int) -> Future[PreparedUnit]:
        work = _prepare if self._local is None else self._local.prepare
        return self._pool.submit(work, unit)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


_preparer: UnitPreparer | None = None  # of this process, when it is one of the pool


def _open(plan: bytes, multiple: int) -> None:
    global _preparer
    _preparer = UnitPreparer(plans.from_json(plan), multiple)


def _prepare(unit: int) -> PreparedUnit:
    assert _preparer is not None
    return _preparer.prepare(unit)

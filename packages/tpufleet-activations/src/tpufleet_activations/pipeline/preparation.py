"""Preparing units for the model: read, tokenize, batch several together.

Imports no JAX: it runs in subprocesses.
"""

from __future__ import annotations

import multiprocessing
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from tpufleet_activations import plans
from tpufleet_activations.inputs import contexts, sources, tokenization
from tpufleet_activations.inputs.contexts import AnyContext
from tpufleet_activations.inputs.samples import TokenizedSample
from tpufleet_activations.io.unit_writer import StoredSample
from tpufleet_activations.pipeline import batches
from tpufleet_activations.pipeline.locations import Locations


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedUnit:
    """The tokenized samples of a unit, and the contexts that the model sees."""

    unit: int
    samples: tuple[TokenizedSample, ...]
    contexts: tuple[AnyContext, ...]


@dataclass(frozen=True, kw_only=True)
class BatchedUnits:
    """Units whose samples share batches, so that few batches are incomplete.

    Contexts are numbered over all units. A unit's contexts come in the same order as if it had been
    batched alone, so its shard does not depend on the others.
    """

    units: tuple[PreparedUnit, ...]
    batches: tuple[batches.Batch, ...]

    @cached_property
    def contexts(self) -> list[AnyContext]:
        """By number."""
        return [context for unit in self.units for context in unit.contexts]

    @cached_property
    def first_contexts(self) -> list[int]:
        """The number of each unit's first context, and the number of all."""
        return [0, *accumulate(len(unit.contexts) for unit in self.units)]

    def last_batches(self) -> list[int]:
        """The number of the last batch with samples of each unit; -1 if none has."""
        first, last = self.first_contexts, [-1] * len(self.units)
        for number, batch in enumerate(self.batches):
            for span in batch.spans:
                last[bisect_right(first, span.sample) - 1] = number
        return last

    def stored_samples(
        self, rows: Sequence[frozenset[int]], *, include_skipped: bool
    ) -> list[list[StoredSample]]:
        """For each unit, its samples in the order in which a process that holds `rows[batch]` of
        each batch writes them; one with several contexts comes several times. `include_skipped`
        appends the samples without tokens."""
        first = self.first_contexts
        orders: list[list[int]] = [[] for _ in self.units]
        for batch, kept in zip(self.batches, rows, strict=True):
            for span in batch.spans:
                if span.row in kept:
                    unit = bisect_right(first, span.sample) - 1
                    orders[unit].append(span.sample - first[unit])
        return [
            _stored(unit, order, include_skipped)
            for unit, order in zip(self.units, orders, strict=True)
        ]


def _stored(unit: PreparedUnit, order: list[int], include_skipped: bool) -> list[StoredSample]:
    if include_skipped:
        order = order + [n for n, context in enumerate(unit.contexts) if not len(context.tokens)]
    return [
        StoredSample(
            sample=context.sample.index,
            tokens=context.sample.tokens[context.stored_positions],
            positions=context.stored_positions,
            metadata=context.metadata,
        )
        for n in order
        for context in unit.contexts[n].stored
    ]


def plan_buckets(plan: plans.ExtractionPlan) -> tuple[int, ...]:
    return plan.buckets or batches.buckets_up_to(plan.max_length)


def batch_units(
    plan: plans.ExtractionPlan,
    units: Sequence[PreparedUnit],
    row_multiple: int,
    *,
    varlen: bool = False,
    fill: bool = False,
    batch_tokens: int | None = None,
) -> BatchedUnits:
    """`batch_tokens`, if not those of the plan."""
    made = batches.make_batches(
        [context.tokens for unit in units for context in unit.contexts],
        batching=batches.resolve_batching(plan.batching, plan_buckets(plan), varlen=varlen),
        buckets=plan_buckets(plan),
        batch_tokens=batch_tokens or plan.batch_tokens,
        row_multiple=row_multiple,
        fill=fill,
        units=[number for number, unit in enumerate(units) for _ in unit.contexts],
    )
    return BatchedUnits(units=tuple(units), batches=tuple(made))


def prepare_samples(
    unit: int, samples: Sequence[TokenizedSample], plan: plans.ExtractionPlan
) -> PreparedUnit:
    divided = contexts.divide(
        samples, max_length=plan.max_length, too_long=plan.too_long, stride=plan.stride
    )
    return PreparedUnit(unit=unit, samples=tuple(samples), contexts=tuple(divided))


class UnitPreparer:
    """Prepares units of one plan; opens the data and the tokenizer once."""

    def __init__(self, plan: plans.ExtractionPlan, locations: Locations):
        self._plan, self._folder = plan, locations.tokenizer
        self._source = sources.PlannedSource(locations.data, plan.data_digest)
        self._vocabulary = locations.architecture.vocabulary

    @cached_property
    def _tokenizer(self) -> tokenization.Tokenizer:
        """Checked again: a process may be started long after the run."""
        opened = tokenization.Tokenizer(self._folder, self._plan.chat_date)
        sources.check_digest("tokenizer", self._plan.tokenizer_digest, opened.digest())
        return opened

    def prepare(self, unit: int) -> PreparedUnit:
        plan = self._plan
        samples = tokenization.tokenize(
            self._source.read(plan.sample_range(unit)),
            self._tokenizer,
            max_length=plan.max_length,
            too_long=plan.too_long,
            vocabulary=self._vocabulary,
            keep=plan.keep,
        )
        return prepare_samples(unit, samples, plan)


class PreparerPool:
    """Prepares units ahead of the model, in subprocesses or (with 0 processes) in one thread."""

    def __init__(self, plan: plans.ExtractionPlan, locations: Locations, processes: int = 0):
        self._local = None if processes else UnitPreparer(plan, locations)
        self._pool: Executor = ThreadPoolExecutor(1)
        if processes:
            # Spawned: forking a process that runs JAX's threads can deadlock. A process is started
            # when all others have a unit.
            self._pool = ProcessPoolExecutor(
                processes,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_initialize,
                initargs=(plan.to_json(), locations),
            )

    def start(self) -> None:
        """Start the first process, which takes a second or two, before the first unit."""
        if self._local is None:
            self._pool.submit(_initialized)

    def submit(self, unit: int) -> Future[PreparedUnit]:
        return self._pool.submit(_prepare if self._local is None else self._local.prepare, unit)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


_preparer: UnitPreparer | None = None  # set in the subprocesses of a pool


def _initialize(plan: bytes, locations: Locations) -> None:
    global _preparer
    _preparer = UnitPreparer(plans.from_json(plan), locations)


def _initialized() -> bool:
    return _preparer is not None


def _prepare(unit: int) -> PreparedUnit:
    assert _preparer is not None
    return _preparer.prepare(unit)

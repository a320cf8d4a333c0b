"""Keeps the global batch of an elastic job: with fewer slices, each chip computes more of it, in
several rounds, so that it needs no more memory than with all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.runtime.context import Context, context


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalBatch:
    """How the examples of one step are divided. A step adds up the gradients of all rounds."""

    size: int  # examples of a step, on however many slices
    rounds: int
    rows: int  # of a round, over all processes; some of them repeat examples, with weight 0
    own: slice  # the rows of each round that this process computes

    def split(self, examples: Any) -> tuple[Any, Any]:
        """The examples of a step, with the shape (rounds, rows, …), and the weight of each: 1, or 0
        for one that is there to fill the last round. Divide the sum of the weighted losses by
        `size`, and the result is the same on any number of slices, but for rounding.

        A program that loads only its own examples passes their numbers:
        `numbers, weights = batch.split(range(step * batch.size, (step + 1) * batch.size))`, and
        loads `numbers[:, batch.own]`."""
        import numpy

        examples = numpy.asarray(examples)
        if len(examples) != self.size:
            raise BadInput(f"{len(examples)} examples; the global batch has {self.size}")
        order = numpy.arange(self.rounds * self.rows)
        weights = (order < self.size).astype(numpy.float32)
        filled = examples[numpy.minimum(order, self.size - 1)]
        shape = (self.rounds, self.rows)
        return filled.reshape(*shape, *examples.shape[1:]), weights.reshape(shape)


def global_batch(size: int, devices: int | None = None, here: Context | None = None) -> GlobalBatch:
    """`devices`: over all processes; by default those of JAX."""
    here = here or context()
    if devices is None:
        import jax

        devices = jax.device_count()
    if size < 1:
        raise BadInput(f"a global batch has at least one example, not {size}")
    all_devices = devices // here.num_slices * here.max_slices
    at_once = -(-size // all_devices) * devices  # as many on each device as with all slices
    rounds = -(-size // at_once)
    rows = -(-size // (rounds * devices)) * devices
    each = rows // here.num_processes
    first = here.process_id * each
    return GlobalBatch(size=size, rounds=rounds, rows=rows, own=slice(first, first + each))

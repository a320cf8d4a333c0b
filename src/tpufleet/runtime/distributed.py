"""The processes of a gang together: joining them, and taking a decision at the same step."""

from __future__ import annotations

import os
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.runtime import stop_signal
from tpufleet.runtime.context import Context, context


def initialize(**options: Any) -> Context:
    """Join the other processes (jax.distributed) and remember SIGTERM instead of dying of it.

    Alone, or as the only process, there is nothing to join. `options` go to
    `jax.distributed.initialize`. Call it before anything else that uses JAX devices.
    """
    here = context()
    if here.num_processes > 1:
        _join(here, options)
    # After JAX: it may put a handler of its own.
    stop_signal.install_stop_handler()
    return here


def _join(here: Context, options: dict[str, Any]) -> None:
    import jax

    if not here.coordinator_address:
        raise BadInput("TPUFLEET_COORDINATOR_ADDRESS is not set, but there are other processes")
    if _on_cpu(jax):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=here.coordinator_address,
        num_processes=here.num_processes,
        process_id=here.process_id,
        **options,
    )


def _on_cpu(jax: Any) -> bool:
    platforms = jax.config.jax_platforms or os.environ.get("JAX_PLATFORMS") or ""
    return platforms.split(",")[0] == "cpu"


def agree(flag: bool) -> bool:
    """True in every process when it is true in any. Every process must call it at the same step.

    The cost is one small all-gather: it waits for the slowest process and for the devices to
    catch up, under a millisecond inside a slice and a few between hosts. Where steps are short,
    ask every tenth step or so.
    """
    if context().num_processes == 1:
        return flag
    import numpy
    from jax.experimental import multihost_utils

    votes = multihost_utils.process_allgather(numpy.asarray(flag, dtype=numpy.int32))
    return bool(numpy.max(votes))


def should_stop_together() -> bool:
    """`should_stop`, answered alike in all processes, so that they leave after the same step.
    It costs what `agree` costs."""
    return agree(stop_signal.should_stop())

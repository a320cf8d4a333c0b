"""Connects the processes of a gang (jax.distributed) and lets them agree on a decision."""

from __future__ import annotations

import os
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.runtime import compiled_programs, profiling, progress_file, stop_signal
from tpufleet.runtime.context import Context, context


def initialize(**options: Any) -> Context:
    """Join the other processes (jax.distributed), install the SIGTERM handler, and answer
    `tpu profile`.

    A single process has nothing to join. `options` are passed to `jax.distributed.initialize`.
    Call it before anything else that uses JAX devices.
    """
    here = context()
    if here.num_processes > 1:
        _join(here, options)
    progress_file.report_imported()
    # After JAX, which may install a handler of its own.
    stop_signal.install_stop_handler()
    profiling.start_profile_listener()
    return here


def _join(here: Context, options: dict[str, Any]) -> None:
    import jax

    if not here.coordinator_address:
        raise BadInput(
            "TPUFLEET_COORDINATOR_ADDRESS is not set, but TPUFLEET_NUM_PROCESSES is greater than 1"
        )
    if _on_cpu(jax):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    progress_file.report_imported()
    with progress_file.timed(progress_file.CONNECT):
        jax.distributed.initialize(
            coordinator_address=here.coordinator_address,
            num_processes=here.num_processes,
            process_id=here.process_id,
            **options,
        )
    compiled_programs.keep(jax, here.process_id)


def _on_cpu(jax: Any) -> bool:
    platforms = jax.config.jax_platforms or os.environ.get("JAX_PLATFORMS") or ""
    return platforms.split(",")[0] == "cpu"


def agree(flag: bool) -> bool:
    """True in every process if it is true in any. Every process must call it at the same step.

    The cost is one small all-gather: it waits for the slowest process and for the devices,
    under a millisecond inside a slice and a few milliseconds between hosts. If steps are short,
    call it every tenth step or so.
    """
    if context().num_processes == 1:
        return flag
    import numpy
    from jax.experimental import multihost_utils

    votes = multihost_utils.process_allgather(numpy.asarray(flag, dtype=numpy.int32))
    return bool(numpy.max(votes))


def should_stop_together() -> bool:
    """`should_stop` with the same answer in all processes, so that they exit after the same step.
    Costs as much as `agree`."""
    return agree(stop_signal.should_stop())

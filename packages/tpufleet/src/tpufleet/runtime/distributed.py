"""Connects the processes of a gang (jax.distributed), keeps the programs that they compile, and
lets them agree on a decision."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import socket
import time
import warnings
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.runtime import profiling, progress_file, stop_signal
from tpufleet.runtime.context import Context, context

# How long the others wait for process 0 to listen before they leave it to JAX, which waits longer.
LISTENS_WITHIN = 60.0
# JAX's cache of compiled programs, in the folder that the agent keeps for the job on this host.
COMPILED_VARIABLE = "TPUFLEET_COMPILED_DIR"
CACHE_OPTIONS = {
    # Also programs that compile fast: with many of them a start takes long.
    "jax_persistent_cache_min_compile_time_secs": 0,
    # A cache of GPUs, in the same folder: its path would be a part of what identifies a program,
    # and differ between hosts.
    "jax_persistent_cache_enable_xla_caches": "none",
}
_WRITE = (
    "cache_key",
    "compile_time_secs",
    "module_name",
    "backend",
    "executable",
    "host_callbacks",
)
_PUT = ("cache_key", "module_name", "executable", "backend", "compile_time")


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
        if here.process_id != 0:
            _wait_until_listening(here.coordinator_address)
        jax.distributed.initialize(
            coordinator_address=here.coordinator_address,
            num_processes=here.num_processes,
            process_id=here.process_id,
            **options,
        )
    _keep_programs(jax, here.process_id)


def _wait_until_listening(address: str) -> None:
    """gRPC, with which JAX connects, tries again only a second after an attempt that failed."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + LISTENS_WITHIN
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host.strip("[]"), int(port)), 1),
        ):
            return
        time.sleep(random.uniform(0.02, 0.06))


def _on_cpu(jax: Any) -> bool:
    platforms = jax.config.jax_platforms or os.environ.get("JAX_PLATFORMS") or ""
    return platforms.split(",")[0] == "cpu"


def _keep_programs(jax: Any, process_id: int) -> None:
    """Before the first program. JAX writes programs of process 0 alone, since it expects one folder
    for all. Yet a program on the devices of one process is another one in each, and on CPUs every
    program is. So here each process writes its own; with a JAX where that is done in another way,
    none does: one that compiles while the others wait would be no faster."""
    folder = os.environ.get(COMPILED_VARIABLE, "")
    if not folder or jax.config.jax_compilation_cache_dir:
        return
    try:
        from jax._src import compilation_cache, compiler

        put = compilation_cache.put_executable_and_time
        known = _parameters(compiler._cache_write) == _WRITE and _parameters(put) == _PUT
    except (ImportError, AttributeError, ValueError):
        known = False
    if not known:
        return

    def write(
        cache_key: str,
        compile_time_secs: float,
        module_name: str,
        backend: Any,
        executable: Any,
        host_callbacks: Any,
    ) -> None:
        if host_callbacks:  # they are addresses in this process
            return
        try:
            put(cache_key, module_name, executable, backend, int(compile_time_secs))
        except Exception as error:  # whatever it is, the program itself can run
            warnings.warn(f"cannot keep the compiled program {module_name}: {error}", stacklevel=2)

    jax.config.update("jax_compilation_cache_dir", folder)
    for name, value in CACHE_OPTIONS.items():
        jax.config.update(name, value)
    if process_id != 0:
        compiler._cache_write = write


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


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

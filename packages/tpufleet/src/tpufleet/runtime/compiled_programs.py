"""JAX's cache of compiled programs in a gang, in the folder that the agent keeps on each host."""

from __future__ import annotations

import inspect
import os
import warnings
from typing import Any

FOLDER_VARIABLE = "TPUFLEET_COMPILED_DIR"
OPTIONS = {
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


def keep(jax: Any, process_id: int) -> None:
    """Before the first program. JAX writes programs of process 0 alone, since it expects one folder
    for all. Yet a program on the devices of one process is another one in each, and on CPUs every
    program is. So here each process writes its own; with a JAX where that is done in another way,
    none does: one that compiles while the others wait would be no faster."""
    folder = os.environ.get(FOLDER_VARIABLE, "")
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
    for name, value in OPTIONS.items():
        jax.config.update(name, value)
    if process_id != 0:
        compiler._cache_write = write


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)

"""Starting JAX's devices, which takes seconds on accelerators, while other work is done."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress

# Here and not in the thread: two threads that import NumPy at the same time break it.
import jax

# A CPU works out small matrix products, of which attention has many, on one core each. Divided into
# several devices, it has a batch's rows on as many cores. Each has a share of every batch, so not
# as many as a large machine has cores.
MOST_CPU_DEVICES = 4
FORCED = "xla_force_host_platform_device_count"
# JAX takes most of a GPU's memory when it starts, against fragmentation: two seconds. A model with
# fewer bytes of weights than this leaves even a small GPU so much room that it need not.
SMALL_MODEL = 2e9
MEMORY_OPTIONS = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def start(mesh: Mapping[str, int] | None = None, *, weight_bytes: float = 0) -> threading.Thread:
    """Start the devices for a mesh of these sizes in the background. Whoever asks JAX for them
    meanwhile waits, and gets the error if there is one. After `jax.distributed.initialize`.
    `weight_bytes` of the model, if known."""
    if 0 < weight_bytes < SMALL_MODEL and not any(name in os.environ for name in MEMORY_OPTIONS):
        os.environ[MEMORY_OPTIONS[0]] = "false"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    _divide_cpu(cpu_devices(cores, mesh or {}))
    thread = threading.Thread(target=_start, name="extract-devices", daemon=True)
    thread.start()
    return thread


def cpu_devices(cores: int, mesh: Mapping[str, int]) -> int:
    """As many as a mesh needs; for as many as there are, one for each core, up to a limit."""
    share = mesh.get("fsdp", 1) * mesh.get("tensor", 1)
    return share * mesh.get("data", max(min(cores, MOST_CPU_DEVICES) // share, 1))


def _divide_cpu(count: int) -> None:
    """Has no effect on accelerators, if the number is set already, or after JAX has started."""
    configured = getattr(jax.config, "jax_num_cpu_devices", -1)
    if FORCED in os.environ.get("XLA_FLAGS", "") or configured != -1:
        return
    with suppress(RuntimeError):  # JAX has started
        jax.config.update("jax_num_cpu_devices", count)


def _start() -> None:
    with suppress(Exception):  # JAX tries again, and raises it again, where they are needed
        jax.local_devices()

"""Starting JAX's devices, which takes seconds on accelerators, while other work is done."""

from __future__ import annotations

import logging
import threading

# Here and not in the thread: two threads that import NumPy at the same time break it.
import jax

log = logging.getLogger(__name__)


def start() -> threading.Thread:
    """Start the devices in the background. Whoever asks JAX for them meanwhile waits, and gets the
    error if there is one. After `jax.distributed.initialize`, which has to come first."""
    thread = threading.Thread(target=_start, name="extract-devices", daemon=True)
    thread.start()
    return thread


def _start() -> None:
    try:
        jax.local_devices()
    except Exception as error:
        # JAX tries again, and raises it again, where the devices are needed.
        log.info("devices did not start: %s", error)

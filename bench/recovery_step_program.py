"""The job of `recovery_step.py`: steps across processes, with the time of everything it does.

It writes one line `moment what step attempt` to its file in TRACE, and fails in the way that the
file TRACE/fault asks for. With arguments it runs an example instead: its path, and its arguments.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

BEGAN = time.time()
TRACE = Path(os.environ["TRACE"])
PAUSE, SAVE_EVERY = float(os.environ["STEP_SECONDS"]), int(os.environ["SAVE_EVERY"])
STEPS = int(os.environ.get("STEPS", 10**9))
ATTEMPT, PROCESS = os.environ["TPUFLEET_ATTEMPT"], os.environ["TPUFLEET_PROCESS_ID"]


def note(what: str, step: int = 0, at: float | None = None) -> None:
    with (TRACE / f"{PROCESS}.log").open("a") as file:
        file.write(f"{time.time() if at is None else at} {what} {step} {ATTEMPT}\n")


def fail_if_asked(step: int) -> None:
    """The last process, once."""
    fault = TRACE / "fault"
    if int(PROCESS) != int(os.environ["TPUFLEET_NUM_PROCESSES"]) - 1 or not fault.exists():
        return
    kind = fault.read_text()
    fault.unlink()
    note("fault", step)
    if kind == "crash":
        os._exit(1)
    if kind == "memory":
        print("MemoryError", file=sys.stderr, flush=True)
        os._exit(1)
    os.kill(os.getpid(), signal.SIGSTOP)  # hang


def main() -> None:
    import jax
    import jax.monitoring
    import jax.numpy as jnp
    import numpy
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from tpufleet import runtime

    note("started", at=BEGAN)
    note("imported")
    compiled = []

    def count(event: str, **_: object) -> None:
        if event == "/jax/compilation_cache/compile_requests_use_cache":
            compiled.append(1)
        elif event == "/jax/compilation_cache/cache_hits":
            compiled.pop()

    jax.monitoring.register_event_listener(count)
    here = runtime.initialize()
    note("joined")
    step, newest = 0, runtime.checkpoints.latest()
    if newest is not None:
        step = int((newest.part(here.process_id) / "step").read_text())
    note("restored", step)
    rows = NamedSharding(Mesh(numpy.array(jax.devices()), ("chip",)), PartitionSpec("chip"))
    x = jax.make_array_from_callback(
        (jax.device_count(),), rows, lambda index: numpy.ones(jax.device_count())[index]
    )
    train = jax.jit(lambda x, y: (jnp.sin(x) * y).sum())
    while step < STEPS:
        began = time.monotonic()
        note("begin", step + 1)
        fail_if_asked(step)
        time.sleep(max(0.0, began + PAUSE - time.monotonic()))  # as long as a real step takes
        float(train(x, numpy.float32(step)))
        step += 1
        note("step", step)
        note("compiled", len(compiled))
        runtime.progress(step)
        stop = runtime.should_stop_together()
        if stop or step % SAVE_EVERY == 0:
            save(step)
        if stop:
            sys.exit("asked to stop")


def save(step: int) -> None:
    from tpufleet import runtime

    note("saving", step)
    runtime.checkpoints.save(step, lambda folder: (folder / "step").write_text(str(step)) and None)
    note("saved", step)
    runtime.checkpoints.prune(keep=3)


def run_example(path: str, *arguments: str) -> None:
    """Its steps are those that it reports."""
    from tpufleet import runtime

    report, latest = runtime.progress, 0

    def progress(step: int, **more: object) -> None:
        nonlocal latest
        latest = step
        note("step", step)
        report(step, **more)  # type: ignore[arg-type]

    def watch() -> None:
        while True:
            fail_if_asked(latest)
            time.sleep(0.02)

    runtime.progress = progress
    threading.Thread(target=watch, daemon=True).start()
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


if sys.argv[1:]:
    run_example(*sys.argv[1:])
else:
    main()

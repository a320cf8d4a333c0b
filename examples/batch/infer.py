"""Batch inference in which every unit counts exactly once, whatever is preempted.

The input is divided into units. A process claims one, computes it, writes the output and commits.
When its slice goes away, others take over its claim; a commit that comes too late is refused. Any
number of jobs may work on one output folder: submit the file twice, with the same `out`.

python infer.py out=predictions      # standalone on a laptop
tpu submit job.yaml --follow         # every host takes units on its own
"""

import io
import json
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tpufleet import runtime
from tpufleet.errors import Fenced
from tpufleet.runtime.units import Units
from tpufleet_activations.io.addresses import open_storage

SETTINGS = {"out": "", "units": 24, "unit_rows": 64, "unit_seconds": 0.0}
FEATURES, CLASSES = 16, 10
LEASE = timedelta(seconds=20)  # units of a worker that is silent for so long are taken over


@jax.jit
def predict(x: jax.Array) -> jax.Array:
    """The model: here one product with fixed weights."""
    weights = jax.random.normal(jax.random.key(0), (FEATURES, CLASSES))
    return jnp.argmax(x @ weights, axis=-1)


def inputs(unit: int, rows: int) -> np.ndarray:
    """Read the rows of one unit here: a file, or a range of a table."""
    return np.random.default_rng(unit).standard_normal((rows, FEATURES), np.float32)


def renew_lease(units: Units) -> None:
    while True:
        time.sleep(LEASE.total_seconds() / 4)
        units.heartbeat()


def main(*, out, units: int, unit_rows: int, unit_seconds: float) -> None:
    here = runtime.context()  # no jax.distributed: each host works on its own
    runtime.install_stop_handler()
    store = open_storage(out or f"{here.checkpoint_dir}/predictions")
    worker = f"{here.job_id}-{here.process_id}"
    queue = Units(store, count=units, worker=worker, incarnation=here.attempt, lease=LEASE)
    threading.Thread(target=renew_lease, args=[queue], daemon=True).start()
    while not queue.finished():
        if runtime.should_stop():
            queue.leave()  # others may take over at once
            sys.exit("asked to stop")  # not 0: the job is not complete
        claim = queue.claim()
        if claim is None:  # others hold what is left
            time.sleep(0.2)
            continue
        classes = np.asarray(predict(inputs(claim.unit, unit_rows)))
        time.sleep(unit_seconds)  # simulates more work
        buffer = io.BytesIO()
        np.save(buffer, classes)
        # The token makes the name unique: of two workers, each writes its own object, and the
        # commit says whose counts.
        name = f"outputs/{claim.unit:06d}-{claim.token}.npy"
        store.replace(name, buffer.getvalue())
        try:
            queue.commit(claim, {"output": name, "rows": len(classes)})
        except Fenced as error:
            print(error, flush=True)
        done = len(queue.committed())
        runtime.progress(done, total=units, checkpoint_step=done)
    # Others may have committed the last ones.
    runtime.progress(units, total=units, checkpoint_step=units)
    if here.process_id == 0:
        commits = queue.committed()
        listing = {unit: dict(commit.outcome) for unit, commit in commits.items()}
        store.replace("index.json", json.dumps(listing, indent=1).encode())
        rows = sum(outcome["rows"] for outcome in listing.values())
        print(f"done: {len(listing)} units, {rows} rows", flush=True)


def read(out: str | Path) -> np.ndarray:
    """The predictions in order: each unit once, from the object that was committed."""
    store = open_storage(out)
    listing = json.loads(store.read("index.json"))
    names = [listing[str(unit)]["output"] for unit in range(len(listing))]
    return np.concatenate([np.load(io.BytesIO(store.read(name))) for name in names])


if __name__ == "__main__":
    arguments = dict(argument.split("=", 1) for argument in sys.argv[1:])
    main(**{name: type(value)(arguments.get(name, value)) for name, value in SETTINGS.items()})

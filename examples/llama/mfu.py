"""Measure the model FLOPs utilization (MFU) of pretraining on one chip, with random tokens.

python mfu.py                                  # several settings, each in a process of its own
python mfu.py model=1b batch=8 remat=dots      # one

MFU is the FLOP/s that the model needs, over the peak of the chip: what the backward pass computes
again does not count, and of attention only the half below the diagonal.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import jax
import model
import numpy as np
import pretrain

SETTINGS = {"model": "1b", "batch": 8, "length": 4096, "remat": "none", "steps": 20, "skip": 5}
TRIALS = (
    "model=1b batch=8 length=2048 remat=none",
    "model=1b batch=8 length=4096 remat=dots",
    "model=1b batch=16 length=2048 remat=dots",
    "model=3b batch=8 length=2048 remat=dots",
    "model=3b batch=4 length=4096 remat=dots",
    "model=3b batch=16 length=2048 remat=full",
)
# Leaves the memory that JAX would keep back for others.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}


def measure(*, model_name, batch, length, remat, steps, skip) -> dict[str, object]:
    """The median of the steps after the first `skip`, which include compilation."""
    config = replace(model.MODELS[model_name], length=length, remat=remat)
    transform = pretrain.optimizer(3e-4, 10, 1000)

    @jax.jit
    def init() -> dict[str, object]:
        params = model.init(config, 0)
        return {"params": params, "moments": transform.init(params)}

    state, train_step = init(), pretrain.make_train_step(config, transform)
    rng, seconds, loss = np.random.default_rng(0), [], 0.0
    for _ in range(skip + steps):
        tokens = rng.integers(config.vocabulary, size=(batch, length + 1), dtype=np.int32)
        tokens, weights = jax.device_put((tokens[None], np.ones((1, batch), np.float32)))
        jax.block_until_ready((tokens, state))
        began = time.perf_counter()
        state, loss = train_step(state, tokens, weights)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - began)
    step = float(np.median(seconds[skip:]))
    rate = batch * length / step
    peak = pretrain.peak_flops()
    return {
        "model": model_name, "parameters": model.count(config), "batch": batch, "length": length,
        "remat": remat, "chip": jax.devices()[0].device_kind, "step_seconds": round(step, 4),
        "tokens_per_second": round(rate), "loss": round(float(loss), 4),
        "tflops": round(rate * model.flops_per_token(config) / 1e12, 1),
        "mfu": peak and round(rate * model.flops_per_token(config) / peak, 4),
    }  # fmt: skip


def main() -> None:
    if sys.argv[1:]:
        arguments = dict(argument.split("=", 1) for argument in sys.argv[1:])
        settings = {key: type(value)(arguments.get(key, value)) for key, value in SETTINGS.items()}
        print(json.dumps(measure(model_name=settings.pop("model"), **settings)), flush=True)
        return
    results = []
    for trial in TRIALS:
        command = [sys.executable, __file__, *trial.split()]
        done = subprocess.run(
            command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            results.append(json.loads(done.stdout.splitlines()[-1]))
            print(done.stdout.splitlines()[-1], flush=True)
        else:  # most often, out of memory
            reason = next(iter(done.stderr.strip().splitlines()[-1:]), "")
            print(f"{trial}: exit status {done.returncode}: {reason[:300]}", flush=True)
    if results:
        best = max(results, key=lambda result: result["tflops"])
        print(f"best: {best['mfu']} MFU, {best['tflops']} TFLOP/s, {best['chip']}: {best}")


if __name__ == "__main__":
    main()

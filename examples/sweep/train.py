"""Fit a line by gradient descent. Reports its loss, so that `tpu compare` can plot it."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from tpufleet import runtime

SETTINGS = {"lr": 0.1, "steps": 30}


def main(lr: float, steps: int) -> None:
    runtime.initialize()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 8), np.float32)
    y = x @ np.linspace(-1, 1, 8, dtype=np.float32)

    @jax.jit
    def update(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(weights)
        return weights - lr * gradient, loss

    weights = jnp.zeros(8)
    for step in range(1, steps + 1):
        weights, loss = update(weights)
        runtime.progress(step, total=steps, loss=loss)
    print(f"lr={lr} loss={float(loss):.6g}", flush=True)


if __name__ == "__main__":
    arguments = dict(argument.split("=", 1) for argument in sys.argv[1:])
    main(**{name: type(value)(arguments.get(name, value)) for name, value in SETTINGS.items()})

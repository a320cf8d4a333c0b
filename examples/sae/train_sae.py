"""A TopK sparse autoencoder, trained in JAX on rows of a stream or of a stored dataset.

    tpu extract plan acts --model MODEL --data TEXTS --site resid_post.8 --too-long concat
    tpu extract run acts --stream unix:/tmp/acts          # in another terminal, or as a job
    python examples/sae/train_sae.py unix:/tmp/acts resid_post.8 sae.safetensors

Instead of the address, the folder or bucket of a dataset that `tpu extract run acts` has stored
gives the same rows in the same order, and so the same autoencoder. Parameters, optimizer and
position are saved together in CHECKPOINT: run the same command again after an interruption.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy

from tpufleet_activations.streams import stream


def init(width: int, latents: int, mean: np.ndarray, seed: int) -> dict[str, jax.Array]:
    """Unit directions; the encoder begins as the transposed decoder."""
    directions = jax.random.normal(jax.random.key(seed), (latents, width))
    directions /= jnp.linalg.norm(directions, axis=1, keepdims=True)
    return {
        "W_enc": directions.T,
        "b_enc": jnp.zeros(latents),
        "W_dec": directions,
        "b_dec": jnp.asarray(mean, jnp.float32),
    }


def reconstruct(params: dict[str, jax.Array], rows: jax.Array, k: int) -> jax.Array:
    before = (rows - params["b_dec"]) @ params["W_enc"] + params["b_enc"]
    values, ids = jax.lax.top_k(before, k)
    chosen = params["W_dec"][ids]  # [rows, k, width]
    return jnp.einsum("rk,rkw->rw", jax.nn.relu(values), chosen) + params["b_dec"]


def loss(params: dict[str, jax.Array], rows: jax.Array, k: int) -> jax.Array:
    """The share of the variance that is not explained."""
    error = jnp.square(rows - reconstruct(params, rows, k)).sum()
    return error / jnp.square(rows - rows.mean(0)).sum()


@functools.partial(jax.jit, static_argnames=("k", "rate"))
def step(params: Any, state: Any, rows: jax.Array, *, k: int, rate: float) -> Any:
    value, gradients = jax.value_and_grad(loss)(params, rows.astype(jnp.float32), k)
    updates, state = optax.adam(rate).update(gradients, state)
    params = optax.apply_updates(params, updates)
    norms = jnp.linalg.norm(params["W_dec"], axis=1, keepdims=True)
    return {**params, "W_dec": params["W_dec"] / norms}, state, value


def train(
    source: str,
    site: str,
    *,
    latents: int,
    k: int,
    batch: int,
    rate: float = 1e-3,
    seed: int = 0,
    credentials: str | None = None,
    checkpoint: Path | None = None,
    every: int = 100,
) -> Iterator[tuple[float, dict[str, np.ndarray]]]:
    """The loss after each batch, and the parameters."""
    saved: dict[str, Any] | None = None
    if checkpoint is not None and checkpoint.exists():
        saved = load(checkpoint)
    position = None if saved is None else saved["position"]
    with stream(
        source, site, batch=batch, seed=seed, credentials=credentials, position=position
    ) as batches:
        params = state = None if saved is None else saved["arrays"]
        for number, rows in enumerate(batches, 1):
            values = rows.values[site]
            if params is None:
                mean = values.astype(np.float32).mean(0)
                params = init(values.shape[1], latents, mean, seed)
                state = optax.adam(rate).init(params)
            elif saved is not None:
                shapes = init(values.shape[1], latents, np.zeros(values.shape[1]), seed)
                tree = jax.tree.structure((shapes, optax.adam(rate).init(shapes)))
                params, state = jax.tree.unflatten(tree, saved["arrays"])
                saved = None
            params, state, value = step(params, state, jnp.asarray(values), k=k, rate=rate)
            if checkpoint is not None and number % every == 0:
                save(checkpoint, jax.tree.leaves((params, state)), batches.position)
            yield float(value), params


def save(path: Path, arrays: list[Any], position: dict[str, Any]) -> None:
    """One file, so that model and position are never of different steps."""
    draft = path.with_suffix(".draft")
    named = {f"{number:04d}": np.asarray(array) for number, array in enumerate(arrays)}
    safetensors.numpy.save_file(named, draft, metadata={"position": json.dumps(position)})
    os.replace(draft, path)


def load(path: Path) -> dict[str, Any]:
    with safetensors.safe_open(path, "numpy") as file:
        arrays = [file.get_tensor(name) for name in sorted(file.keys())]
        return {"position": json.loads(file.metadata()["position"]), "arrays": arrays}


def export(path: Path, params: dict[str, Any], k: int) -> None:
    """What `tpu extract plan --encode` takes."""
    arrays = {name: np.ascontiguousarray(values) for name, values in params.items()}
    safetensors.numpy.save_file(arrays, path, metadata={"k": str(k)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="unix:/PATH, tcp://HOST:PORT, or a dataset")
    parser.add_argument("site")
    parser.add_argument("output", type=Path, help="the autoencoder, .safetensors")
    parser.add_argument("--latents", type=int, default=16384)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--credentials", help="folder with cert.pem and token, for tcp://")
    parser.add_argument("--checkpoint", type=Path, help="where to continue after an interruption")
    options = vars(parser.parse_args())
    output = options.pop("output")
    params: dict[str, Any] = {}
    for number, (value, trained) in enumerate(train(**options), 1):
        params = trained
        if number % 20 == 0:
            print(f"batch {number}: {value:.4f} of the variance is not explained", flush=True)
    if params:
        export(output, params, options["k"])
        print(f"wrote {output}")


if __name__ == "__main__":
    main()

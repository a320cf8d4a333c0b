"""Reading datasets: what programs that use activations import."""

from __future__ import annotations

from typing import Any

import numpy as np

from tpufleet_activations.io.addresses import open_storage
from tpufleet_activations.io.dataset_reader import Dataset as Dataset
from tpufleet_activations.io.loaders import ShuffledBatches as ShuffledBatches
from tpufleet_activations.io.loaders import as_torch as as_torch
from tpufleet_activations.io.loaders import hugging_face_dataset as hugging_face_dataset
from tpufleet_activations.io.loaders import torch_dataset as torch_dataset
from tpufleet_activations.io.shuffling import shuffled_batches as shuffled_batches
from tpufleet_activations.io.shuffling import shuffled_rows as shuffled_rows
from tpufleet_activations.io.site_statistics import site_statistics as site_statistics


def open_dataset(url: str) -> Dataset:
    """The dataset in a folder or bucket, as committed at the time of the call."""
    return Dataset(open_storage(url))


def as_jax(values: np.ndarray) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(values)

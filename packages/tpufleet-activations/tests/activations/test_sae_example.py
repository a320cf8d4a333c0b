"""examples/sae: the same autoencoder from a stream and from a stored dataset, and across a stop."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.activations.tiny_model import tpu
from tpufleet_activations.io import datasets

pytest.importorskip("optax")
ROOT = Path(__file__).resolve().parents[4]
SITE = "resid_post.1"
SIZES = {"latents": 64, "k": 4, "batch": 64, "rate": 1e-2}


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_sae", ROOT / "examples/sae/train_sae.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(model_folder, tmp_path_factory):
    made = tmp_path_factory.mktemp("sae")
    chance = random.Random(4)
    texts = ["".join(chance.choices("abcdef ", k=chance.randrange(1, 70))) for _ in range(80)]
    (made / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    model = shutil.copytree(model_folder, made / "model")
    (model / "tokenizer_config.json").write_text(json.dumps({"bos_token": "?"}))
    assert plan(made, "stored")[0] == 0
    shutil.copytree(made / "stored", made / "streamed")
    assert tpu("run", made / "stored", "--quiet")[0] == 0
    return made


def plan(made, name, *more):
    return tpu(
        "plan", made / name, "--model", made / "model", "--data", made / "data.jsonl",
        "--max-length", 32, "--too-long", "concat", "--site", SITE, *more,
    )  # fmt: skip


def test_a_stream_and_a_stored_dataset_give_the_same_autoencoder(example, folder, tmp_path):
    stored = list(example.train(str(folder / "stored"), SITE, **SIZES))
    address = f"unix:{tmp_path}/socket"
    run = lambda: tpu("run", folder / "streamed", "--quiet", "--stream", address)
    thread = threading.Thread(target=run)
    thread.start()
    live = list(example.train(address, SITE, **SIZES))
    thread.join()
    curve = [value for value, _ in stored]
    assert [value for value, _ in live] == curve
    assert curve[-1] < 0.7 * curve[0], "it learns"
    for name, values in stored[-1][1].items():
        assert np.array_equal(values, live[-1][1][name])

    # Its latents, stored sparse, are found by strength.
    example.export(tmp_path / "sae.safetensors", stored[-1][1], SIZES["k"])
    status, output = plan(folder, "sparse", "--encode", tmp_path / "sae.safetensors")
    assert status == 0, output
    assert tpu("run", folder / "sparse", "--quiet")[0] == 0
    sparse = datasets.open_dataset(str(folder / "sparse"))
    assert sparse.read(3, sparse.sites[0]).shape[1] == SIZES["k"]
    status, output = tpu("latents", folder / "sparse", 0, "--json")
    assert status == 0, output


def test_training_continues_where_it_was(example, folder, tmp_path):
    source, checkpoint = str(folder / "stored"), tmp_path / "checkpoint.safetensors"
    whole = [value for value, _ in example.train(source, SITE, **SIZES)]
    kept = {**SIZES, "checkpoint": checkpoint, "every": 5}
    interrupted = itertools.islice(example.train(source, SITE, **kept), 13)
    first = [value for value, _ in interrupted]
    rest = [value for value, _ in example.train(source, SITE, **kept)]
    assert first + rest[3:] == whole
    assert rest == whole[10:]

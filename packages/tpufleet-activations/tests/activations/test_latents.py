"""Latents of sparse autoencoders: computed on the device, stored sparse, found by strength."""

from __future__ import annotations

import json
import random
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from tests.activations.tiny_model import tpu
from tpufleet.errors import BadInput
from tpufleet_activations.io import datasets, latents, verification
from tpufleet_activations.io.addresses import open_storage
from tpufleet_activations.model import encoders

LATENTS, K = 96, 5
SITE = "resid_post.1"


def write_encoder(path, width, *, metadata=None, names=("W_enc", "b_enc")):
    chance = np.random.default_rng(7)
    weights = {
        names[0]: chance.normal(size=(width, LATENTS)).astype(np.float32),
        names[1]: chance.normal(size=LATENTS).astype(np.float32) * 0.1,
        "b_dec": chance.normal(size=width).astype(np.float32) * 0.1,
    }
    metadata = {"k": str(K)} if metadata is None else metadata
    safetensors.numpy.save_file(weights, path, metadata=metadata)
    return weights


@pytest.fixture(scope="module")
def folder(model_folder, tmp_path_factory):
    """A model, data, and a dataset of activations in float32."""
    made = tmp_path_factory.mktemp("latents")
    chance = random.Random(4)
    texts = ["".join(chance.choices("abcdef ", k=chance.randrange(1, 70))) for _ in range(60)]
    (made / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    shutil.copytree(model_folder, made / "model")
    assert plan(made, "dense")[0] == 0
    assert tpu("run", made / "dense", "--quiet")[0] == 0
    return made


def plan(made, name, *more):
    return tpu(
        "plan", made / name, "--model", made / "model", "--data", made / "data.jsonl",
        "--max-length", 128, "--site", SITE, "--dtype", "f32", "--compute", "f32", *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def encoded(folder):
    width = datasets.open_dataset(str(folder / "dense")).plan.widths[SITE]
    weights = write_encoder(folder / "sae.safetensors", width)
    status, output = plan(folder, "sparse", "--encode", folder / "sae.safetensors")
    assert status == 0, output
    status, output = tpu("run", folder / "sparse", "--quiet")
    assert status == 0, output
    return weights


def expected(weights, rows):
    """The K largest of each row, the largest first, and their numbers."""
    before = (rows - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]
    order = np.argsort(-before, axis=1)[:, :K]
    return np.maximum(np.take_along_axis(before, order, 1), 0), order


def test_latents_are_those_of_the_stored_activations(folder, encoded):
    dense = datasets.open_dataset(str(folder / "dense"))
    sparse = datasets.open_dataset(str(folder / "sparse"))
    assert sparse.sites == (f"latents.{SITE}", f"latent_ids.{SITE}")
    for sample in dense:
        values, order = expected(encoded, dense.read(sample, SITE))
        assert np.allclose(sparse.read(sample, sparse.sites[0]), values, rtol=1e-4, atol=1e-5)
        same = sparse.read(sample, sparse.sites[1]) == order
        assert same.mean() > 0.99, "only ties may be in another order"
        assert np.array_equal(sparse.tokens(sample), dense.tokens(sample))
    assert verification.verify(open_storage(folder / "sparse")).intact


def test_the_strongest_tokens_of_a_latent(folder, encoded):
    sparse = datasets.open_dataset(str(folder / "sparse"))
    index = latents.LatentIndex(sparse)
    everything = {}
    for sample in sparse:
        ids, values = sparse.read(sample, sparse.sites[1]), sparse.read(sample, sparse.sites[0])
        for position, (row, strengths) in enumerate(zip(ids, values, strict=True)):
            for latent, value in zip(row.tolist(), strengths.tolist(), strict=True):
                if value > 0:
                    everything.setdefault(latent, []).append((value, sample, position))
    assert len(index) == LATENTS
    for latent in range(LATENTS):
        entries = sorted(everything.get(latent, []), reverse=True)
        assert index.count(latent) == len(entries)
        found = index.strongest(latent)
        assert [entry.value for entry in found] == [
            value for value, _, _ in entries[: latents.STRONGEST]
        ]
        assert {tuple(entry) for entry in found} <= set(entries)


def test_the_index_is_kept(folder, encoded):
    latents.LatentIndex(datasets.open_dataset(str(folder / "sparse")))
    [path] = (folder / "sparse" / "index").glob("latents-*")
    before = path.stat().st_mtime_ns
    latents.LatentIndex(datasets.open_dataset(str(folder / "sparse")))
    assert path.stat().st_mtime_ns == before


def test_the_command_shows_latents_and_writes_a_page(folder, encoded, tmp_path):
    page = tmp_path / "page.html"
    index = latents.LatentIndex(datasets.open_dataset(str(folder / "sparse")))
    active = max(range(LATENTS), key=index.count)
    status, output = tpu("latents", folder / "sparse", active, 4, "--html", page, "--json")
    assert status == 0, output
    shown = json.loads(output)
    assert shown.keys() == {str(active), "4"}
    strongest = shown[str(active)]["strongest"][0]
    text = page.read_text()
    assert f"{strongest[0]:.2f}" in text
    assert f"sample {strongest[1]}, {strongest[2]}" in text
    assert "<script" not in text and "http" not in text
    status, output = tpu("latents", folder / "sparse", LATENTS)
    assert status == 1 and f"{LATENTS}" in output


def test_a_dataset_without_latents_is_refused(folder):
    status, output = tpu("latents", folder / "dense", 1)
    assert status == 2 and "--encode" in output


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"width": 7}, "width 7"),
        ({"metadata": {}}, "have no k"),
        ({"metadata": {"k": "1000"}}, "1000 of 96"),
        ({"names": ("weight", "bias")}, "W_enc"),
    ],
    ids=["another width", "no k", "k too large", "other tensors"],
)
def test_a_file_without_a_fitting_encoder_is_refused(folder, tmp_path, change, problem):
    width = datasets.open_dataset(str(folder / "dense")).plan.widths[SITE]
    write_encoder(tmp_path / "sae.safetensors", **{"width": width, **change})
    status, output = plan(folder, "refused", "--encode", tmp_path / "sae.safetensors")
    assert status == 2 and problem in output
    assert not (folder / "refused" / "plan.json").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"transcode": True},
        {"activation": "groupmax"},
        {"architecture": "batchtopk"},
        {"apply_b_dec_to_input": False},
        {"rescale_acts_by_decoder_norm": True},
        {"normalize_activations": "layer_norm"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_an_encoder_that_computes_something_else_is_refused(tmp_path, settings):
    write_encoder(tmp_path / "sae.safetensors", 8, metadata={})
    known = {"k": K, "activation": "topk", "transcode": False, "normalize_activations": "none"}
    (tmp_path / "cfg.json").write_text(json.dumps(known))
    assert encoders.describe(tmp_path / "sae.safetensors", SITE, 8).k == K
    (tmp_path / "cfg.json").write_text(json.dumps(known | settings))
    with pytest.raises(BadInput, match=next(iter(settings))):
        encoders.describe(tmp_path / "sae.safetensors", SITE, 8)


def test_encoding_needs_one_site(folder, encoded):
    more = ("--encode", folder / "sae.safetensors", "--site", "resid_post.0")
    status, output = plan(folder, "refused", *more)
    assert status == 2 and "one site" in output


def test_a_changed_encoder_is_refused(folder, encoded, tmp_path):
    path = tmp_path / "sae.safetensors"
    shutil.copy(folder / "sae.safetensors", path)
    assert plan(folder, "changed", "--encode", path)[0] == 0
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    status, output = tpu("run", folder / "changed", "--quiet")
    assert status == 1 and "encoder has changed" in output


def test_k_64_of_4096_latents_takes_a_twentieth_of_the_bytes():
    dense = 4096 * np.dtype(ml_dtypes.bfloat16).itemsize
    stored = dtypes_bytes({f"latents.{SITE}": 64, f"latent_ids.{SITE}": 64})
    assert dense / stored > 20


def dtypes_bytes(widths):
    from tpufleet_activations.io import dtypes

    return dtypes.bytes_per_token(widths, "bf16")


@pytest.mark.parametrize("height", [1, 37, 5000])
def test_the_index_does_not_depend_on_the_blocks(height):
    chance = np.random.default_rng(1)
    ids = np.stack([chance.permutation(50)[:4] for _ in range(5000)]).astype(np.int32)
    values = chance.integers(0, 40, ids.shape).astype(np.float32)  # with equal ones
    numbers = np.arange(5000)
    builder = latents.IndexBuilder(50, strongest=8)
    for start in range(0, 5000, height):
        part = slice(start, start + height)
        positions = (numbers[part] % 11).astype(np.int32)
        builder.add(latents.Block(ids[part], values[part], numbers[part] // 11, positions))
    builder.merge()
    for latent in range(50):
        rows, columns = np.nonzero((ids == latent) & (values > 0))
        strengths = values[rows, columns]
        order = np.lexsort((rows, -strengths))[:8]
        assert builder.values[latent].tolist() == strengths[order].tolist()
        assert builder.samples[latent].tolist() == (rows[order] // 11).tolist()
        assert builder.positions[latent].tolist() == (rows[order] % 11).tolist()
        assert builder.counts[latent] == len(rows)

"""Datasets are read back exactly as written, and every modification is detected."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import safetensors.numpy
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.activations import synthetic
from tpufleet.errors import BadInput, Conflict, NotFound
from tpufleet.runtime.units import DamagedRecord, Units
from tpufleet_activations import plans
from tpufleet_activations.io import datasets, shard_writer, shards, unit_writer, verification
from tpufleet_activations.io.addresses import open_storage
from tpufleet_activations.io.storage import LocalFolder
from tpufleet_activations.pipeline import dataset_status


@pytest.fixture
def folder(tmp_path):
    return LocalFolder(tmp_path / "set")


def assert_labels_equal_contents(folder, wanted):
    dataset = datasets.Dataset(folder)
    assert list(dataset) == list(range(wanted.samples))
    for sample in dataset:
        np.testing.assert_array_equal(dataset.tokens(sample), synthetic.tokens(sample))
        for site in synthetic.SITES:
            stored = dataset.read(sample, site).astype(np.float64)
            expected = synthetic.values(sample, site)
            np.testing.assert_array_equal(stored, expected)


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_every_sample_is_read_back_as_stored(folder, dtype, compression):
    wanted = synthetic.plan(samples=11, dtype=dtype, compression=compression)
    synthetic.extract(folder, wanted)
    assert_labels_equal_contents(folder, wanted)
    report = verification.verify(folder)
    assert report.intact, report.problems
    assert report.tokens == sum(synthetic.length(sample) for sample in range(11))


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(samples=st.integers(0, 30), unit=st.integers(1, 9))
def test_any_number_of_samples_and_any_unit_size_loses_nothing(tmp_path_factory, samples, unit):
    folder = LocalFolder(tmp_path_factory.mktemp("set"))
    wanted = synthetic.plan(samples=samples, unit_samples=unit)
    synthetic.extract(folder, wanted)
    assert_labels_equal_contents(folder, wanted)
    assert verification.verify(folder).intact


def test_shards_are_valid_safetensors_files(folder):
    synthetic.extract(folder, synthetic.plan(samples=3, dtype="f32"))
    name = datasets.Dataset(folder).files(0)[0].name
    tensors = safetensors.numpy.load_file(folder.local_path(name))
    at = tensors["sample_index"].tolist().index(1)
    rows = slice(*tensors["sample_rows"][at : at + 2])
    np.testing.assert_array_equal(
        tensors["resid_post.3"][rows], synthetic.values(1, "resid_post.3")
    )


def test_sample_metadata_is_stored(folder):
    synthetic.extract(folder, synthetic.plan())
    about = datasets.Dataset(folder).metadata(7)
    assert (about["id"], about["tokens"]) == ("synthetic-7", synthetic.length(7))


def test_reading_one_layer_of_one_sample_reads_under_one_percent_of_the_bytes(tmp_path):
    class Counting(LocalFolder):
        touched = 0

        def local_path(self, name):
            return None

        def read_range(self, name, start, size):
            data = super().read_range(name, start, size)
            self.touched += len(data)
            return data

    storage = Counting(tmp_path)
    sites = tuple(f"resid_post.{layer}" for layer in range(12))
    wanted = synthetic.plan(
        samples=40, unit_samples=40, sites=sites, widths=dict.fromkeys(sites, 256), dtype="f32"
    )
    plans.write(storage, wanted)
    units = Units(storage, count=1, worker="a")
    claim = units.claim()
    samples = [
        unit_writer.StoredSample(
            sample=n, tokens=np.arange(20), positions=np.arange(20), metadata={}
        )
        for n in range(40)
    ]
    writer = unit_writer.UnitWriter(storage, wanted, claim, samples)
    for site in sites:
        writer.append(site, np.ones((800, 256), np.float32))
    files = writer.finish()
    units.commit(claim, unit_writer.commit_outcome(wanted, 0, files))
    assert datasets.Dataset(storage).read(17, "resid_post.5").shape == (20, 256)
    assert storage.touched < 0.01 * files[0]["size"]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_any_flipped_bit_is_detected(folder, compression):
    synthetic.extract(folder, synthetic.plan(samples=6, compression=compression))
    shard = datasets.Dataset(folder).files(0)[0]
    path = folder.local_path(shard.name)
    good = path.read_bytes()
    chance = random.Random(1)
    for place in [0, 9, len(good) - 1, *(chance.randrange(len(good)) for _ in range(60))]:
        bad = bytearray(good)
        bad[place] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        assert not verification.verify(folder).intact, f"byte {place} was changed unnoticed"
    path.write_bytes(good)
    assert verification.verify(folder).intact


def test_a_missing_or_truncated_shard_is_reported(folder):
    synthetic.extract(folder, synthetic.plan())
    first, second = (datasets.Dataset(folder).files(unit)[0].name for unit in (0, 1))
    folder.local_path(first).unlink()
    path = folder.local_path(second)
    path.write_bytes(path.read_bytes()[:-1])
    problems = "\n".join(verification.verify(folder, deep=False).problems)
    assert f"{first} is missing" in problems
    assert f"{second} has" in problems


def test_reading_a_deleted_shard_names_the_command_that_finds_it(folder):
    synthetic.extract(folder, synthetic.plan())
    path = folder.local_path(datasets.Dataset(folder).files(0)[0].name)
    path.unlink()
    hint = f"{re.escape(str(path))} does not exist; run `tpu extract verify {folder.url}`"
    with pytest.raises(NotFound, match=hint):
        datasets.Dataset(folder).read(0, "resid_post.0")


def test_duplicate_and_missing_samples_are_reported(folder):
    wanted = plans.write(folder, synthetic.plan(samples=3, unit_samples=3))
    units = Units(folder, count=1, worker="a")
    claim = units.claim()
    samples = [
        unit_writer.StoredSample(sample=n, tokens=np.arange(2), positions=np.arange(2), metadata={})
        for n in (0, 1, 1)
    ]
    writer = unit_writer.UnitWriter(folder, wanted, claim, samples)
    for site, width in synthetic.WIDTHS.items():
        writer.append(site, np.zeros((6, width), "bfloat16"))
    units.commit(claim, unit_writer.commit_outcome(wanted, 0, writer.finish()))
    problems = "\n".join(verification.verify(folder).problems)
    assert "sample 1 is stored 2 times" in problems
    assert "sample 2 is stored 0 times" in problems


def test_a_shard_with_missing_rows_cannot_be_finished(folder):
    wanted = synthetic.plan(samples=1)
    claim = Units(folder, count=1, worker="a").claim()
    sample = unit_writer.StoredSample(
        sample=0, tokens=np.arange(2), positions=np.arange(2), metadata={}
    )
    writer = unit_writer.UnitWriter(folder, wanted, claim, [sample])
    writer.append("resid_post.0", np.zeros((1, 8), "bfloat16"))
    with pytest.raises(BadInput, match="expected 2 rows"):
        writer.finish()
    writer.abandon()
    assert folder.names("shards/") == []


def test_a_different_plan_in_the_same_folder_is_rejected_with_the_difference(folder):
    plans.write(folder, synthetic.plan())
    plans.write(folder, synthetic.plan(model="/elsewhere/synthetic"))
    with pytest.raises(Conflict, match="model_digest"):
        plans.write(folder, synthetic.plan(model_digest="m2"))
    with pytest.raises(Conflict, match='data_digest is "d1", requested "43"'):
        plans.write(folder, synthetic.plan(data_digest="43"))


def test_missing_plans_samples_and_sites_are_reported(folder):
    with pytest.raises(NotFound, match="tpu extract plan"):
        datasets.Dataset(folder)
    plans.write(folder, synthetic.plan())
    dataset = datasets.Dataset(folder)
    with pytest.raises(NotFound, match="not committed yet"):
        dataset.read(1, "resid_post.0")
    with pytest.raises(NotFound, match=r"resid_post\.3"):
        dataset.read(1, "resid_post.2")
    with pytest.raises(NotFound, match="the dataset has 10 samples"):
        dataset.read(10, "resid_post.0")
    with pytest.raises(BadInput):
        open_storage("ftp://nowhere")
    with pytest.raises(BadInput, match="a file"):
        open_storage(folder.path / "plan.json")


@pytest.mark.parametrize("world", [1, 3])
def test_every_rank_of_a_shuffled_stream_takes_the_same_steps(folder, world):
    """Also when rows, blocks and units do not divide by the number of ranks."""
    synthetic.extract(folder, synthetic.plan(samples=61, unit_samples=7, dtype="f32"))
    dataset = datasets.Dataset(folder)
    total = sum(synthetic.length(sample) for sample in range(61))
    for block, batch in ((4, 8), (256, 5), (1, 3)):
        steps = [
            [
                len(rows)
                for rows in datasets.shuffled_rows(
                    dataset, "resid_post.0", batch=batch, block=block, rank=rank, world_size=world
                )
            ]
            for rank in range(world)
        ]
        assert all(own == steps[0] for own in steps), (block, batch)
        assert sum(map(sum, steps)) == total - total % world


@pytest.mark.parametrize("world", [1, 3])
def test_shuffled_rows_yields_every_row_once_in_a_reproducible_random_order(folder, world):
    wanted = synthetic.plan(samples=60, unit_samples=7, dtype="f32")
    synthetic.extract(folder, wanted)
    dataset = datasets.Dataset(folder)

    def rows(seed):
        return [
            tuple(row)
            for rank in range(world)
            for batch in datasets.shuffled_rows(
                dataset, "mlp_hidden.1", batch=8, seed=seed, block=4, rank=rank, world_size=world
            )
            for row in batch.tolist()
        ]

    stored = [tuple(row) for n in range(60) for row in synthetic.values(n, "mlp_hidden.1").tolist()]
    left_over = Counter(stored) - Counter(rows(1))
    assert left_over.total() == len(stored) % world and not Counter(rows(1)) - Counter(stored)
    assert rows(1) == rows(1)
    assert rows(1) != rows(2)
    assert rows(1) != stored


def test_shuffled_batches_say_where_each_row_comes_from(folder):
    synthetic.extract(folder, synthetic.plan(samples=40, unit_samples=7, dtype="f32"))
    dataset = datasets.Dataset(folder)
    sites = ["resid_post.0", "mlp_hidden.1"]
    seen = 0
    for rows in datasets.shuffled_batches(dataset, sites, batch=16, block=4):
        for n, (sample, position) in enumerate(zip(rows.samples, rows.positions, strict=True)):
            assert rows.tokens[n] == dataset.tokens(sample)[position]
            for site in sites:
                np.testing.assert_array_equal(
                    rows.values[site][n], dataset.read(sample, site)[position]
                )
        seen += len(rows.tokens)
    assert seen == sum(synthetic.length(sample) for sample in range(40))


@pytest.mark.parametrize("batch, together", [(8, 3), (50, 2), (1000, 4)])
def test_a_shuffled_stream_resumes_at_any_batch(folder, batch, together):
    synthetic.extract(folder, synthetic.plan(samples=30, unit_samples=7, dtype="f32"))
    dataset = datasets.Dataset(folder)

    def batches(skip: int) -> list[bytes]:
        stream = datasets.shuffled_batches(
            dataset, ["resid_post.0"], batch=batch, block=4, blocks_in_memory=together, skip=skip
        )
        return [rows.values["resid_post.0"].tobytes() + rows.samples.tobytes() for rows in stream]

    whole = batches(0)
    for skip in range(len(whole) + 2):
        assert batches(skip) == whole[skip:]


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_rows_are_the_same_however_they_are_read(folder, dtype, compression):
    """Straight from files, or decompressed and converted first; in whatever batches."""
    wanted = synthetic.plan(samples=40, unit_samples=7, dtype=dtype, compression=compression)
    synthetic.extract(folder, wanted)
    dataset = datasets.Dataset(folder)
    for batch, block, together in ((16, 4, 3), (7, 256, 256), (1000, 1, 2)):
        seen = []
        for rows in datasets.shuffled_batches(
            dataset, synthetic.SITES, batch=batch, block=block, blocks_in_memory=together
        ):
            for n, (sample, position) in enumerate(zip(rows.samples, rows.positions, strict=True)):
                seen.append((int(sample), int(position)))
                for site in synthetic.SITES:
                    stored = dataset.read(sample, site)[position]
                    np.testing.assert_array_equal(rows.values[site][n], stored)
        stored = [(s, n) for s in range(40) for n in range(synthetic.length(s))]
        assert sorted(seen) == stored and seen != stored


def test_batches_that_are_kept_never_change(folder):
    """The memory of a batch is used again only once nobody can see it."""
    synthetic.extract(folder, synthetic.plan(samples=60, unit_samples=7, dtype="f32"))
    dataset = datasets.Dataset(folder)

    def stream():
        return datasets.shuffled_rows(
            dataset, "mlp_hidden.1", batch=8, block=2, blocks_in_memory=8, seed=3
        )

    kept = [rows[1:3] for rows in stream()]  # views, whose batch has no other reference
    copies = [rows[1:3].copy() for rows in stream()]
    for _ in range(3):
        assert sum(map(len, stream()))
    np.testing.assert_array_equal(np.concatenate(kept), np.concatenate(copies))


def test_a_truncated_shard_is_an_error_and_not_rows_of_another_epoch(folder):
    synthetic.extract(folder, synthetic.plan(samples=40, unit_samples=40, dtype="f32"))
    dataset = datasets.Dataset(folder)
    sum(map(len, datasets.shuffled_rows(dataset, "resid_post.0", batch=8)))
    path = folder.local_path(dataset.files(0)[0].name)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(NotFound, match=r"ends before .*tpu extract verify"):
        sum(map(len, datasets.shuffled_rows(dataset, "mlp_hidden.1", batch=8)))


def test_more_shards_than_the_open_file_limit_can_be_read(folder):
    synthetic.extract(folder, synthetic.plan(samples=120, unit_samples=1, dtype="f32"))
    dataset = datasets.Dataset(folder)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 90, limit[1]))
    try:
        rows = sum(map(len, datasets.shuffled_rows(dataset, "resid_post.0", batch=64)))
        assert rows == sum(synthetic.length(sample) for sample in range(120))
        for sample in (0, 119):
            assert len(dataset.read(sample, "resid_post.3")) == synthetic.length(sample)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@pytest.mark.parametrize(
    "argument, value",
    [
        ("batch", 0),
        ("block", 0),
        ("blocks_in_memory", -1),
        ("world_size", 0),
        ("rank", 3),
        ("rank", -1),
        ("skip", -1),
    ],
)
def test_an_invalid_argument_of_a_shuffled_stream_is_named_at_once(folder, argument, value):
    synthetic.extract(folder, synthetic.plan(samples=2))
    dataset, options = datasets.Dataset(folder), {"batch": 4, argument: value}
    with pytest.raises(BadInput, match=f"^{argument} is {value}, expected"):
        datasets.shuffled_rows(dataset, "resid_post.0", **options)
    with pytest.raises(BadInput, match=f"^{argument} is {value}, expected"):
        datasets.shuffled_batches(dataset, ["resid_post.0"], **options)


@pytest.mark.parametrize("together", [2, 256])
def test_a_batch_larger_than_the_dataset_takes_no_more_memory_than_its_rows(folder, together):
    synthetic.extract(folder, synthetic.plan(samples=20))
    dataset = datasets.Dataset(folder)
    total = sum(map(synthetic.length, range(20)))

    def stream(batch, **more):
        options = {"batch": batch, "block": 4, "blocks_in_memory": together, **more}
        return list(datasets.shuffled_rows(dataset, "resid_post.0", **options))

    whole = stream(10**15)
    assert [len(rows) for rows in whole] == [total]
    np.testing.assert_array_equal(whole[0], stream(total + 1)[0])
    assert stream(10**15, skip=1) == []


def test_only_samples_of_a_damaged_record_cannot_be_read(folder):
    synthetic.extract(folder, synthetic.plan(samples=10, unit_samples=4))
    record = folder.path / "units/00000001-0001.json"
    intact = record.read_bytes()
    (folder.path / "units/notes.txt").write_bytes(b"of somebody else")
    monitor = dataset_status.DatasetMonitor(folder)
    for content in (b"", b"{", b"[]", b'{"kind": "commit"}', b"\xff"):
        record.write_bytes(content)
        dataset = datasets.open_dataset(str(folder.path))
        assert list(dataset) == [0, 1, 2, 3, 8, 9] and not dataset.complete
        for sample in dataset:
            stored = dataset.read(sample, "resid_post.0").astype(np.float64)
            np.testing.assert_array_equal(stored, synthetic.values(sample, "resid_post.0"))
        with pytest.raises(DamagedRecord, match=r"00000001-0001\.json"):
            dataset.read(5, "resid_post.0")
        with pytest.raises(DamagedRecord, match=r"00000001-0001\.json"):
            datasets.shuffled_rows(dataset, "resid_post.0", batch=4)
        with pytest.raises(DamagedRecord):
            datasets.site_statistics(dataset, "resid_post.0")
        assert len(dataset_status.DatasetMonitor(folder).status()["damaged"]) == 1
    record.write_bytes(b"")
    monitor.status()
    record.write_bytes(intact)
    assert monitor.status()["status"] == "DONE" and not monitor.status()["damaged"]


def test_a_stream_of_a_dataset_that_has_grown_is_not_resumed(folder):
    synthetic.extract(folder, synthetic.plan(samples=21, unit_samples=7, dtype="f32"))
    complete = datasets.Dataset(folder)
    partial = datasets.Dataset(folder)
    partial.commits = {unit: commit for unit, commit in complete.commits.items() if unit}
    assert partial.fingerprint != complete.fingerprint == datasets.Dataset(folder).fingerprint
    options = {"batch": 2, "seed": 1, "skip": 1}
    with pytest.raises(Conflict, match=r"another: 3 of 3 units are committed now"):
        datasets.shuffled_batches(
            complete, synthetic.SITES, expected=partial.fingerprint, **options
        )
    resumed = datasets.shuffled_batches(
        complete, synthetic.SITES, expected=complete.fingerprint, **options
    )
    _, second = islice(datasets.shuffled_batches(complete, synthetic.SITES, batch=2, seed=1), 2)
    assert next(resumed).samples.tolist() == second.samples.tolist()


def test_a_script_that_ends_with_an_unfinished_stream_says_nothing(folder):
    """Modules are gone when the stream is closed."""
    synthetic.extract(folder, synthetic.plan(samples=21, unit_samples=7, dtype="f32"))
    script = f"""
import concurrent.futures.thread
from tpufleet_activations.io import datasets
dataset = datasets.open_dataset({str(folder.path)!r})
kept = datasets.shuffled_rows(dataset, {synthetic.SITES[0]!r}, batch=2, blocks_in_memory=2)
next(kept)
class Last:
    def __del__(self, kept=kept, futures=concurrent.futures.thread):
        futures.queue = None
        kept.close()
last = Last()
del kept
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_one_site_of_a_shuffled_stream_may_be_named_without_a_list(folder):
    synthetic.extract(folder, synthetic.plan(samples=4))
    dataset = datasets.Dataset(folder)
    rows = next(datasets.shuffled_batches(dataset, "resid_post.3", batch=64))
    assert list(rows.values) == ["resid_post.3"]
    with pytest.raises(NotFound, match=r"site resid_post\.2 is not"):
        datasets.shuffled_batches(dataset, "resid_post.2", batch=64)


def test_shuffled_rows_of_a_missing_site_are_rejected(folder):
    synthetic.extract(folder, synthetic.plan(samples=2))
    with pytest.raises(NotFound, match=r"resid_post\.3"):
        next(datasets.shuffled_rows(datasets.Dataset(folder), "attn_out.0", batch=4))


@pytest.mark.slow
def test_torch_and_jax_see_the_same_bits(folder):
    torch = pytest.importorskip("torch")
    synthetic.extract(folder, synthetic.plan(samples=2))
    values = datasets.Dataset(folder).read(0, "resid_post.0")
    assert datasets.as_torch(values).dtype == torch.bfloat16
    np.testing.assert_array_equal(datasets.as_torch(values).float().numpy(), values.astype("f4"))
    np.testing.assert_array_equal(np.asarray(datasets.as_jax(values)), values)


def test_a_plan_is_read_back_as_written(folder):
    wanted = plans.write(folder, synthetic.plan(buckets=(16, 32)))
    assert plans.load(folder).identity == wanted.identity
    assert plans.load(folder).buckets == (16, 32)
    body = json.loads(folder.read("plan.json"))
    with pytest.raises(BadInput, match=r"cannot read .*plan\.json"):
        plans.from_json(b'{"model"')
    with pytest.raises(BadInput, match=r"missing .*model_digest"):
        plans.from_json(b'{"model": "x"}')
    with pytest.raises(BadInput, match="novelty"):
        plans.from_json(json.dumps({**body, "novelty": 1}).encode())


def whole_digest(data: bytes) -> str:
    pieces = [data[n : n + shards.PIECE] for n in range(0, len(data), shards.PIECE)]
    joined = b"".join(blake3(piece).digest() for piece in pieces)
    return hashlib.sha256(joined).hexdigest()


@pytest.mark.parametrize("threads", [1, 7])
def test_a_shard_does_not_depend_on_part_sizes_or_thread_count(tmp_path, threads):
    chance = np.random.default_rng(threads)
    values = {
        name: chance.integers(0, 255, (rows, 1 << 10), dtype=np.uint8)
        for name, rows in (("wide", 13_000), ("narrow", 4096), ("none", 0))
    }
    tensors = [shards.Tensor(name=n, dtype="U8", shape=v.shape) for n, v in values.items()]
    pool = shard_writer.WriterPool(threads, backlog=3)
    writer = shard_writer.RawShardWriter(
        shard_writer.DraftFile(tmp_path / "draft"), "name", tensors, pool
    )
    for name, rows in values.items():
        at = 0
        while at < len(rows):
            sizes = chance.integers(1, 2_000, chance.integers(1, 9)).tolist()
            stops = [min(at + sum(sizes[: n + 1]), len(rows)) for n in range(len(sizes))]
            starts = [at, *stops[:-1]]
            writer.append(name, *(rows[a:b] for a, b in zip(starts, stops, strict=True)))
            at = stops[-1]
    file = writer.finish()
    pool.shutdown()
    stored = (tmp_path / "draft").read_bytes()
    assert len(stored) == file.size
    for name, rows in values.items():
        tensor = file.tensors[name]
        assert stored[tensor.offset : tensor.offset + tensor.nbytes] == rows.tobytes()
        assert tensor.digest == whole_digest(rows.tobytes())


def test_a_failed_write_fails_the_shard(tmp_path):
    tensor = shards.Tensor(name="x", dtype="U8", shape=(8, 1 << 20))
    pool = shard_writer.WriterPool(2, backlog=2)
    writer = shard_writer.RawShardWriter(
        shard_writer.DraftFile(tmp_path / "draft"), "name", [tensor], pool
    )
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, limit[1]))
    try:
        writer.append("x", np.zeros((8, 1 << 20), np.uint8))
        with pytest.raises(OSError, match="too large"):
            writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    writer.abandon()
    pool.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_plans_that_were_made_before_there_were_encoders_keep_their_identity():
    """Commits of stored units name it."""
    identity = "fa62fbc04f1d4bd0aeb2fc79aeb2b3238b75f8000d82cb1e0427b97b50c1d22b"
    assert synthetic.plan().identity == identity
    assert synthetic.plan(encode={"digest": "e1", "path": "/x"}).identity != identity

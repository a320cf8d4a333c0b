"""Shards in buckets: sent from memory while a unit is written, at the default sizes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import tempfile
import threading
import uuid

import pytest

from tests.activations import bucket_worker
from tests.polling import wait_until
from tpufleet.errors import ProviderUnavailable
from tpufleet.runtime.units import Units
from tpufleet_activations import plans
from tpufleet_activations.io import datasets, shard_writer, unit_writer, verification
from tpufleet_activations.io.addresses import open_storage


@pytest.fixture
def empty_disk(tmp_path, monkeypatch):
    """The folder for temporary files; afterwards it must still be empty."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == [], "a file was staged on the disk"


def new_bucket(scheme: str):
    return open_storage(f"{scheme}://activations/runs/{uuid.uuid4().hex}")


def assert_as_written(storage, units: int, *, deep: bool = True) -> None:
    report = verification.verify(storage, deep=deep)
    assert report.intact, report.problems
    dataset = datasets.Dataset(storage)
    for sample in range(0, units * bucket_worker.UNIT_SAMPLES, 8):
        assert set(dataset.tokens(sample).tolist()) == {sample}
        for site in dataset.sites:
            expected = bucket_worker.values(sample, site)
            assert dataset.read(sample, site).tobytes() == expected.tobytes()


def test_a_unit_is_sent_from_memory_while_it_is_written(cloud, empty_disk):
    storage = new_bucket(cloud)
    wanted = plans.write(storage, bucket_worker.plan(1))
    units = Units(storage, count=1, worker="a")
    claim = units.claim()
    uploader = shard_writer.WriterPool(8, 16)
    samples = bucket_worker.samples(wanted, claim.unit)
    writer = unit_writer.UnitWriter(storage, wanted, claim, samples, uploader=uploader)
    for sample in range(len(samples)):
        for site in bucket_worker.SITES:
            writer.append(site, bucket_worker.values(sample, site))
        if sample == 7:  # the first file holds 8 samples
            wait_until(lambda: storage.names("shards/"), describe="the first file is not there")
    files = writer.finish()
    uploader.shutdown()
    assert [file["name"] for file in files] == storage.names("shards/") and len(files) == 2
    units.commit(claim, unit_writer.commit_outcome(wanted, 0, files))
    # The emulator of S3 reads a whole object for each range.
    assert_as_written(storage, 1, deep=cloud == "gs")


def test_an_abandoned_unit_leaves_nothing_behind(cloud, empty_disk):
    storage = new_bucket(cloud)
    wanted = plans.write(storage, bucket_worker.plan(1))
    claim = Units(storage, count=1, worker="a").claim()
    samples = bucket_worker.samples(wanted, claim.unit)
    writer = unit_writer.UnitWriter(storage, wanted, claim, samples)
    for sample in range(8):
        for site in bucket_worker.SITES:
            writer.append(site, bucket_worker.values(sample, site))
    assert len(storage.names("shards/")) == 1
    writer.abandon()
    assert storage.names("shards/") == []


def test_a_slow_bucket_holds_the_writer_back(google):
    """However much is written, no more files wait in memory than the pool of streams allows."""
    storage, gate, appended = new_bucket("gs"), threading.Event(), []

    class Slow:
        file_bytes = 1  # every sample is a file

        def __getattr__(self, name):
            return getattr(storage, name)

        def put(self, content, name):
            assert gate.wait(900)
            storage.put(content, name)

    wanted = plans.write(storage, bucket_worker.plan(1))
    claim = Units(storage, count=1, worker="a").claim()
    samples = bucket_worker.samples(wanted, claim.unit)
    uploader = shard_writer.WriterPool(1, 2)
    writer = unit_writer.UnitWriter(Slow(), wanted, claim, samples, uploader=uploader)

    def append() -> None:
        for sample in samples:
            for site in bucket_worker.SITES:
                writer.append(site, bucket_worker.values(sample.sample, site))
            appended.append(sample.sample)

    thread = threading.Thread(target=append)
    thread.start()
    wait_until(lambda: len(appended) == 2, describe=lambda: appended)
    thread.join(0.2)
    assert len(appended) == 2, "the writer did not wait for the bucket"
    gate.set()
    thread.join()
    assert len(writer.finish()) == len(samples)
    uploader.shutdown()


def test_a_failed_upload_fails_the_unit(google):
    storage = new_bucket("gs")

    class Broken:
        file_bytes = 64 << 20

        def __getattr__(self, name):
            return getattr(storage, name)

        def put(self, content, name):
            raise ProviderUnavailable("no answer")

    wanted = plans.write(storage, bucket_worker.plan(1))
    claim = Units(storage, count=1, worker="a").claim()
    pools = shard_writer.WriterPool(2, 4), shard_writer.WriterPool(2, 4)
    with pytest.raises(ProviderUnavailable, match="no answer"):
        bucket_worker.write_unit(Broken(), wanted, claim, pools)
    for pool in pools:
        pool.shutdown()


def test_a_stream_over_buffers_reads_like_a_file():
    data = bytes(range(200))
    cuts = [0, 1, 1, 70, 140, 200]
    parts = [memoryview(data)[a:b] for a, b in itertools.pairwise(cuts)]
    stream = shard_writer.BufferStream(parts)
    assert (stream.size, stream.tell(), stream.read()) == (200, 0, data)
    assert stream.seek(60) == 60 and stream.read(20) == data[60:80]
    buffer = bytearray(100)
    stream.seek(-10, 2)
    assert stream.readinto(buffer) == 10 and stream.read(1) == b"" and stream.readinto(buffer) == 0
    assert buffer[:10] == data[190:]


def survive_kills(google, kills: int, units: int, seed: int) -> int:
    """Kill workers with SIGKILL at random moments until so many have died; returns how many did
    while a unit was in their hands."""
    spawn, chance = multiprocessing.get_context("forkserver"), random.Random(seed)
    spawn.set_forkserver_preload([bucket_worker.__name__])
    died = 0
    while died < kills:
        url = f"gs://activations/kills/{uuid.uuid4().hex}"
        while died < kills:
            started = spawn.Event()
            worker = spawn.Process(
                target=bucket_worker.work, args=(url, units, f"w{died}", 0.3, started)
            )
            worker.start()
            assert started.wait(900)
            worker.join(chance.uniform(0.0, 1.5))
            finished = worker.exitcode is not None
            worker.kill()
            worker.join()
            if finished:
                break
            died += 1
        storage = open_storage(url)

        def complete(url: str = url, storage=storage) -> bool:
            bucket_worker.work(url, units, "heir", 0.3)
            return len(datasets.Dataset(storage).commits) == units

        wait_until(complete)
        assert_as_written(storage, units)
        verification.delete_leftovers(storage)
        named = {
            file.name for unit in range(units) for file in datasets.Dataset(storage).files(unit)
        }
        assert set(storage.names("shards/")) == named
        for name in storage.names(""):
            storage.delete(name)
    return died


def test_killed_workers_lose_nothing_in_a_bucket(google):
    assert survive_kills(google, kills=2, units=1, seed=1) == 2


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_a_thousand_killed_workers_lose_nothing_in_a_bucket(google):
    """EXTRACT_KILLS is the number of kills, EXTRACT_SEED chooses their moments."""
    kills = int(os.environ.get("EXTRACT_KILLS", "1000"))
    seed = int(os.environ.get("EXTRACT_SEED", "2"))
    assert survive_kills(google, kills, units=3, seed=seed) == kills

"""The index of commits is true at any moment, and saves reading records while it grows."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tpufleet.errors import NotFound, ProviderUnavailable
from tpufleet.runtime import index_parts
from tpufleet.runtime.object_store import FolderStore
from tpufleet.runtime.units import Units

COUNT = 4_000


class Bucket:
    """Objects in memory that counts requests as a bucket would: 1,000 names in a listing."""

    far = True

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self._lock = threading.Lock()

    def create(self, name, data):
        with self._lock:
            if name in self.objects:
                return False
            self.objects[name] = data
            return True

    def replace(self, name, data):
        self.objects[name] = data

    def read(self, name):
        self.requests["read"] += 1
        try:
            return self.objects[name]
        except KeyError:
            raise NotFound(name) from None

    def read_range(self, name, start, size):
        return self.read(name)[start : start + size]

    def names(self, prefix, start="", end=""):
        found = sorted(
            name
            for name in list(self.objects)
            if name.startswith(prefix) and name >= start and (not end or name < end)
        )
        self.requests["list"] += -(-len(found) // 1_000) or 1
        return found

    def delete(self, name):
        self.objects.pop(name, None)


class Clock:
    now = 1_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def bucket():
    return Bucket()


@pytest.fixture
def worker(bucket):
    def build(name="a", **options) -> Units:
        return Units(bucket, count=COUNT, worker=name, **{"indexed": True, **options})

    return build


def commit(units: Units, number: int) -> None:
    for _ in range(number):
        claim = units.claim()
        units.commit(claim, {"unit": claim.unit, "token": claim.token})


def records(bucket: Bucket) -> dict:
    """The truth: every commit, from the records alone."""
    return Units(bucket, count=COUNT, worker="judge").committed()


def opened(bucket: Bucket) -> dict:
    bucket.requests.clear()
    return Units(bucket, count=COUNT, worker="reader", indexed=True).committed()


def test_a_growing_dataset_opens_without_reading_its_records(bucket, worker):
    workers = [worker(f"w{n}") for n in range(4)]
    for _ in range(8):
        for each in workers:
            commit(each, 100)
    commits = opened(bucket)
    assert commits.keys() == records(bucket).keys() and len(commits) == 3_200
    opened(bucket)
    # Of each worker at most 127 commits and a claim are not in the index yet.
    assert bucket.requests["read"] < 4 * 128 + 40
    assert bucket.requests["list"] <= 10
    for each in workers:
        each.leave()
    opened(bucket)
    assert bucket.requests["read"] < 40 and bucket.requests["list"] <= 10
    assert {unit: dict(one.outcome) for unit, one in opened(bucket).items()} == {
        unit: one.outcome for unit, one in records(bucket).items()
    }


def test_slow_units_are_in_the_index_after_half_a_minute(bucket, worker):
    clock = Clock()
    slow = worker("slow", clock=clock)
    commit(slow, 3)
    assert not bucket.names("index/")
    clock.now += 31
    commit(slow, 1)
    assert len(bucket.names("index/")) == 1
    opened(bucket)
    assert bucket.requests["read"] == 1


def test_the_parts_of_a_worker_are_merged(bucket, worker):
    commit(worker(), 3_000)
    parts = bucket.names(index_parts.PART)
    assert len(parts) == 2 + 7  # two merged ones, and 7 of the last 952 commits, with 56 pending
    assert opened(bucket).keys() == records(bucket).keys()


def test_a_part_that_is_merged_while_it_is_read_costs_nothing_but_time(bucket, worker):
    busy = worker()
    commit(busy, 1_000)
    listed, names = [], bucket.names

    def list_then_merge(prefix, *bounds):
        found = names(prefix, *bounds)
        if prefix == index_parts.FOLDER and not listed:
            listed.append(True)
            commit(busy, 200)
        return found

    bucket.names = list_then_merge
    commits = opened(bucket)
    assert bucket.requests["read"] < 250
    assert len(commits) == 1_200 and commits.keys() == records(bucket).keys()


def test_commits_of_killed_workers_are_found_and_indexed_by_the_next(bucket, worker):
    for n in range(5):
        commit(worker(f"killed{n}"), 100)  # never written to the index
    assert len(opened(bucket)) == 500
    assert bucket.requests["read"] == 500
    heirs = [worker("heir"), worker("twin")]
    for heir in heirs:
        heir.committed()
    for heir in heirs:
        heir.index_found()
    assert len(bucket.names(index_parts.PART)) == 1
    commits = opened(bucket)
    assert bucket.requests["read"] < 10
    assert commits.keys() == records(bucket).keys()


def test_no_index_says_that_a_reopened_unit_is_committed(bucket, worker):
    """Also one that a worker writes late, with what it knew before."""
    late, early = worker("late"), worker("early")
    commit(late, 100)  # pending
    commit(early, 200)
    judge = Units(bucket, count=COUNT, worker="repair", tolerant=True)
    known = list(judge.committed())
    bad = [*known[:3], *known[-3:]]
    judge.announce_reopened(bad)
    assert all(judge.reopen(unit, "damaged") for unit in bad)
    assert len(bucket.names(index_parts.REOPENED)) == 1
    early.leave()
    late.leave()
    assert set(known) - set(opened(bucket)) == set(bad)
    assert set(worker("new").committed()) == set(known) - set(bad)
    assert set(early.committed()) == set(known) - set(bad), "a running worker is told, too"
    rebuild = worker("rebuild")
    commit(rebuild, COUNT - len(known) + len(bad))
    rebuild.leave()
    rebuild.write_index()
    after = opened(bucket)
    assert len(after) == COUNT and bucket.requests["list"] == 1
    assert {unit for unit in known if after[unit].outcome["token"]} == set(bad)


def test_a_dataset_is_complete_once_its_last_unit_is(bucket, worker):
    workers = [worker(f"w{n}") for n in range(3)]
    while not workers[0].finished():
        for each in workers * 100:
            claim = each.claim()
            if claim is None:
                break
            each.commit(claim, {"unit": claim.unit})
    for each in workers:
        each.leave()
        each.write_index()
    assert len(opened(bucket)) == COUNT
    assert (bucket.requests["list"], bucket.requests["read"]) == (1, 1), "of the index"
    for name in index_parts.obsolete(bucket):
        bucket.delete(name)
    assert opened(bucket).keys() == records(bucket).keys()


def test_an_index_that_cannot_be_written_fails_no_commit(bucket, worker, caplog):
    replace = bucket.replace

    def fail(name, data):
        if name.startswith("index/") and len(failures) < 2:
            failures.append(name)
            raise ProviderUnavailable("no answer")
        replace(name, data)

    failures: list[str] = []
    bucket.replace = fail
    busy = worker()
    with caplog.at_level(logging.WARNING):
        commit(busy, 300)
    assert len(failures) == 2 and "the index was not written: no answer" in caplog.text
    busy.leave()
    opened(bucket)
    assert len(opened(bucket)) == 300 and bucket.requests["read"] < 10


@pytest.mark.parametrize("damage", [b"", b"x" * 500, b"12 zz\n"])
def test_a_damaged_part_is_not_used(bucket, worker, damage):
    commit(worker(), 300)
    for name in bucket.names(index_parts.PART):
        bucket.objects[name] = damage
    assert opened(bucket) == records(bucket)


def test_threads_of_one_worker_commit_at_the_same_time(tmp_path):
    units = Units(FolderStore(tmp_path), count=1_000, worker="a", indexed=True)
    claims = [units.claim() for _ in range(300)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda claim: units.commit(claim, {"unit": claim.unit}), claims))
    units.leave()
    reader = Units(FolderStore(tmp_path), count=1_000, worker="b", indexed=True)
    assert {unit: one.outcome["unit"] for unit, one in reader.committed().items()} == {
        claim.unit: claim.unit for claim in claims
    }


def test_a_bucket_lists_small_datasets_at_once(bucket):
    """Ranges would be more requests."""
    units = Units(bucket, count=40, worker="a", indexed=True)
    claims = [units.claim() for _ in range(40)]
    for claim in claims[::2]:
        units.commit(claim, {})
    bucket.requests.clear()
    assert len(units.committed()) == 20
    assert bucket.requests["list"] == 2  # the index and the records
    assert json.loads(bucket.objects["units/00000003-0000.json"])["kind"] == "claim"

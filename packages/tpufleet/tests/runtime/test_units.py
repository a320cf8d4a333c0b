"""Work units are committed exactly once, whichever worker dies and whenever."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from tpufleet.errors import BadInput, Fenced, NotFound
from tpufleet.runtime.object_store import FolderStore
from tpufleet.runtime.units import INDEX, Units

LEASE = timedelta(seconds=60)


class ManualClock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def worker(tmp_path, clock):
    def build(name: str, count: int = 1, **options) -> Units:
        settings = {"lease": LEASE, "clock": clock, **options}
        return Units(FolderStore(tmp_path), count=count, worker=name, **settings)

    return build


def test_create_succeeds_once_and_keeps_the_first_content(tmp_path):
    folder = FolderStore(tmp_path)
    assert folder.create("units/a.json", b"first")
    assert not folder.create("units/a.json", b"second")
    assert folder.read("units/a.json") == b"first"
    assert folder.names("units/") == ["units/a.json"]


def test_reading_a_missing_object_raises_not_found(tmp_path):
    with pytest.raises(NotFound):
        FolderStore(tmp_path).read("units/none.json")


def test_a_worker_without_a_name_is_rejected(tmp_path):
    with pytest.raises(BadInput):
        Units(FolderStore(tmp_path), count=1, worker="")


def test_each_unit_is_claimed_once_and_then_none_is_left(worker):
    units = worker("a", count=5)
    claimed = [units.claim().unit for _ in range(5)]
    assert sorted(claimed) == [0, 1, 2, 3, 4]
    assert units.claim() is None
    assert worker("b", count=5).claim() is None


def test_a_committed_unit_is_never_claimed_again(worker, clock):
    units = worker("a")
    units.commit(units.claim(), {"rows": 3})
    clock.advance(10_000)
    assert worker("b").claim() is None
    assert worker("b").committed()[0].outcome == {"rows": 3}
    assert worker("b").finished()


def test_a_dead_workers_unit_is_taken_over_when_its_lease_expires(worker, clock):
    first = worker("a").claim()
    clock.advance(59)
    assert worker("b").claim() is None
    clock.advance(2)
    second = worker("b").claim()
    assert (second.unit, second.token) == (first.unit, first.token + 1)


def test_heartbeats_keep_the_unit(worker, clock):
    units = worker("a")
    units.claim()
    for _ in range(10):
        clock.advance(50)
        units.heartbeat()
        assert worker("b").claim() is None


def test_a_late_commit_after_a_take_over_is_fenced(worker, clock):
    late, heir = worker("late"), worker("heir")
    old = late.claim()
    clock.advance(61)
    new = heir.claim()
    with pytest.raises(Fenced, match="heir"):
        late.commit(old, {"by": "late"})
    heir.commit(new, {"by": "heir"})
    with pytest.raises(Fenced):
        late.commit(old, {"by": "late"})
    assert worker("x").committed()[0].outcome == {"by": "heir"}


def test_repeating_a_commit_is_idempotent(worker):
    units = worker("a")
    claim = units.claim()
    units.commit(claim, {"n": 1})
    units.commit(claim, {"n": 1})
    assert units.committed()[0].token == 0


def test_a_restarted_worker_takes_over_its_own_unit_immediately(worker):
    worker("job-1/0", incarnation=0).claim()
    assert worker("job-1/0", incarnation=0).claim() is None
    again = worker("job-1/0", incarnation=1).claim()
    assert again.token == 1


def test_heartbeats_of_another_incarnation_do_not_keep_the_unit(worker, clock):
    held = worker("a", incarnation=5).claim()
    other_incarnation = worker(
        "a", incarnation=3
    )  # incarnations come from a clock, and it was set back
    clock.advance(59)
    other_incarnation.heartbeat()
    assert other_incarnation.claim() is None and worker("b").claim() is None
    clock.advance(2)
    other_incarnation.heartbeat()
    taken = worker("b").claim()
    assert (taken.unit, taken.token) == (held.unit, 1)


def test_leaving_does_not_release_units_of_a_later_incarnation(worker):
    before, after = worker("a", incarnation=0), worker("a", incarnation=1)
    after.claim()
    before.leave()
    assert worker("b").claim() is None


def test_many_records_are_read_in_parallel(tmp_path):
    """As from a bucket, where latency dominates."""
    writer = Units(FolderStore(tmp_path), count=40, worker="a")
    for number in range(39):
        writer.commit(writer.claim(), {"n": number})
    writer.claim()
    waiting = threading.Barrier(8)

    class Bucket(FolderStore):
        far = True

        def read(self, name):
            with contextlib.suppress(threading.BrokenBarrierError):
                waiting.wait(900)  # until eight reads run at the same time
            return super().read(name)

    units = Units(Bucket(tmp_path), count=40, worker="b")
    assert len(units.committed()) == 39 and not waiting.broken
    assert [claim.worker for claim in units.open_claims().values()] == ["a"]


class CountingStore(FolderStore):
    """Counts the objects read, and the listings."""

    reads = listings = 0

    def read(self, name):
        self.reads += 1
        return super().read(name)

    def read_range(self, name, start, size):
        self.reads += 1
        return super().read_range(name, start, size)

    def names(self, prefix, *bounds):
        self.listings += 1
        return super().names(prefix, *bounds)


def test_commits_are_read_from_the_index_in_one_piece(tmp_path):
    writer = Units(FolderStore(tmp_path), count=50, worker="a")
    for number in range(50):
        writer.commit(writer.claim(), {"n": number, "text": "a b\n"})
    writer.write_index()
    store = CountingStore(tmp_path)
    commits = Units(store, count=50, worker="b", indexed=True).committed()
    assert (store.reads, store.listings) == (1, 1), (
        "only the index is listed; a bucket lists 1,000 names in a request"
    )
    assert commits == writer.committed()
    assert store.reads == 2, "all outcomes are in one block"


def test_an_index_that_is_replaced_while_it_is_used_is_not_misread(tmp_path):
    store = FolderStore(tmp_path)
    writer = Units(store, count=4, worker="a")
    for number in range(4):
        writer.commit(writer.claim(), {"n": number})
    writer.write_index()
    reader = Units(store, count=4, worker="b", indexed=True).committed()
    assert writer.reopen(0, "damaged")
    writer.commit(writer.claim(), {"n": "a longer outcome"})
    writer.write_index()
    assert len({reader[unit].outcome["n"] for unit in range(4)}) == 4
    assert "a longer outcome" not in {reader[unit].outcome["n"] for unit in range(4)}


def test_a_reopened_unit_is_no_longer_taken_from_the_index(tmp_path):
    store = FolderStore(tmp_path)
    finished = Units(store, count=3, worker="a")
    for _ in range(3):
        finished.commit(finished.claim(), {"try": 1})
    finished.write_index()
    repair = Units(store, count=3, worker="repair")
    assert len(repair.committed()) == 3 and repair.reopen(1, "damaged")
    assert sorted(Units(store, count=3, worker="b", indexed=True).committed()) == [0, 2]
    finished.write_index()  # by a worker that has not heard of it
    assert sorted(Units(store, count=3, worker="b", indexed=True).committed()) == [0, 2]
    rebuild = Units(store, count=3, worker="c")
    rebuild.commit(rebuild.claim(), {"try": 2})
    rebuild.write_index()
    after = Units(store, count=3, worker="b", indexed=True).committed()
    assert [commit.outcome["try"] for commit in after.values()] == [1, 2, 1]


def test_what_the_index_lacks_is_read_from_the_records(tmp_path):
    writer = Units(FolderStore(tmp_path), count=3, worker="a")
    for _ in range(2):
        writer.commit(writer.claim(), {"try": 1})
    writer.write_index()
    assert writer.reopen(next(iter(writer.committed())), "damaged")
    for _ in range(2):  # the third unit, and the reopened one
        writer.commit(writer.claim(), {"try": 2})
    reader = Units(FolderStore(tmp_path), count=3, worker="b", indexed=True)
    assert reader.committed() == Units(FolderStore(tmp_path), count=3, worker="c").committed()
    assert sorted(commit.outcome["try"] for commit in reader.committed().values()) == [1, 2, 2]


@pytest.mark.parametrize("damage", [lambda text: text[:-40], lambda text: text.replace(b"1", b"2")])
def test_a_damaged_index_is_not_used(tmp_path, damage):
    store = FolderStore(tmp_path)
    writer = Units(store, count=3, worker="a")
    for _ in range(3):
        writer.commit(writer.claim(), {"n": 1})
    writer.write_index()
    store.replace(INDEX, damage(store.read(INDEX)))
    reader = Units(store, count=3, worker="b", indexed=True)
    assert reader.committed() == writer.committed()


def test_units_of_a_worker_that_left_are_taken_over_immediately(worker):
    leaving = worker("a")
    held = leaving.claim()
    assert worker("b").claim() is None
    leaving.leave()
    assert worker("b").claim().unit == held.unit


def test_units_are_stolen_only_as_a_last_resort_and_with_growing_delay(worker, clock):
    slow = worker("slow", count=2)
    thief = worker("thief", count=2, steal_after=timedelta(seconds=100))
    held = slow.claim()
    clock.advance(101)
    slow.heartbeat()
    assert thief.claim().unit != held.unit
    stolen = thief.claim()
    assert (stolen.unit, stolen.token) == (held.unit, 1)
    # The thief is slow too; the next take-over needs twice the delay.
    other = worker("other", count=2, steal_after=timedelta(seconds=100))
    clock.advance(110)
    thief.heartbeat()
    taken = other.claim()
    assert taken is None or taken.unit != held.unit
    clock.advance(100)
    thief.heartbeat()
    assert held.unit in {claim.unit for claim in filter(None, [other.claim(), other.claim()])}


def test_a_new_process_resumes_from_the_records(worker):
    units = worker("a", count=4)
    for _ in range(3):
        claim = units.claim()
        units.commit(claim, {"unit": claim.unit})
    fresh = worker("b", count=4)
    assert len(fresh.committed()) == 3
    last = fresh.claim()
    assert last.unit not in fresh.committed()


@pytest.mark.slow
def test_sixty_four_workers_share_a_thousand_units_without_duplicates(tmp_path):
    count, claimers = 1_000, 64
    done: list[int] = []
    lock = threading.Lock()

    class QuickFolder(FolderStore):
        """The same names and links, without fsync."""

        def _draft(self, target, data):
            draft = target.with_name(f".{target.name}.{os.urandom(8).hex()}")
            draft.write_bytes(data)
            return draft

    def work(number: int) -> None:
        units = Units(QuickFolder(tmp_path), count=count, worker=f"worker-{number}")
        while (claim := units.claim()) is not None:
            units.commit(claim, {"by": number})
            with lock:
                done.append(claim.unit)

    with ThreadPoolExecutor(claimers) as pool:
        list(pool.map(work, range(claimers)))
    assert sorted(done) == list(range(count))
    commits = Units(FolderStore(tmp_path), count=count, worker="reader").committed()
    assert len(commits) == count
    assert all(commit.token == 0 for commit in commits.values())


class Killed(BaseException):
    pass


class DiesAt:
    """An object store whose user is killed before or after the n-th write."""

    def __init__(self, inner: FolderStore, step: int, after: bool):
        self.inner, self.left, self.after = inner, step, after

    def _write(self, action, *arguments):
        self.left -= 1
        if self.left == 0 and not self.after:
            raise Killed
        answer = action(*arguments)
        if self.left == 0:
            raise Killed
        return answer

    def create(self, name, data):
        return self._write(self.inner.create, name, data)

    def replace(self, name, data):
        return self._write(self.inner.replace, name, data)

    def read(self, name):
        return self.inner.read(name)

    def names(self, prefix):
        return self.inner.names(prefix)


@pytest.mark.parametrize("after", [False, True], ids=["before-write", "after-write"])
def test_death_at_any_write_leaves_each_unit_committed_once(tmp_path, clock, after):
    for step in range(1, 13):
        folder = FolderStore(tmp_path / f"{after}-{step}")
        dying = Units(DiesAt(folder, step, after), count=3, worker="a", lease=LEASE, clock=clock)
        with pytest.raises(Killed):
            while True:
                dying.commit(dying.claim() or _stop(), {"by": "a"})
        clock.advance(61)
        heir = Units(folder, count=3, worker="b", lease=LEASE, clock=clock)
        while (claim := heir.claim()) is not None:
            heir.commit(claim, {"by": "b"})
        assert sorted(heir.committed()) == [0, 1, 2]


def _stop():
    raise Killed


def test_a_killed_process_leaves_no_partial_record(tmp_path):
    """A real process, killed with SIGKILL while it commits as fast as it can."""
    script = (
        "import sys; from tpufleet.runtime.object_store import FolderStore\n"
        "from tpufleet.runtime.units import Units\n"
        "units = Units(FolderStore(sys.argv[1]), count=5000, worker='victim')\n"
        "while (claim := units.claim()):\n"
        "    units.commit(claim, {'fill': 'x' * 5000})\n"
        "    print(claim.unit, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    for _ in range(20):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    folder = FolderStore(tmp_path)
    records = [json.loads(folder.read(name)) for name in folder.names("units/")]
    assert len(records) >= 40
    assert {record["kind"] for record in records} == {"claim", "commit"}

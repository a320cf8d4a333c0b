"""After a crash at any point, each sample is stored exactly once with identical bytes."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest

from tests.activations import synthetic
from tests.activations.test_datasets import assert_labels_equal_contents
from tpufleet.errors import Fenced
from tpufleet.runtime.units import Units
from tpufleet_activations import plans
from tpufleet_activations.io import datasets, unit_writer, verification
from tpufleet_activations.io.storage import LocalFolder

LEASE = timedelta(seconds=60)


class Killed(BaseException):
    """Not an Exception, as nothing may catch it: the machine is gone."""


class Mortal(LocalFolder):
    """A folder whose machine dies at the n-th touch: before it, after it, or half-way through."""

    def __init__(self, path, die_at: int, how: str):
        super().__init__(path)
        self.left, self.how = die_at, how

    def _step(self, action, *arguments):
        self.left -= 1
        if self.left != 0:
            return action(*arguments)
        if self.how == "after":
            action(*arguments)
        raise Killed

    def create(self, name, data):
        return self._step(super().create, name, data)

    def replace(self, name, data):
        return self._step(super().replace, name, data)

    def upload(self, draft, name):
        if self.left == 1 and self.how == "halfway":
            # A store without atomic visibility: the name shows, the content is cut.
            self._target(name).write_bytes(draft.read_bytes()[: draft.stat().st_size // 2])
        return self._step(super().upload, draft, name)

    def staging(self):
        return self._step(super().staging)


class Clock:
    now = 1_000.0

    def __call__(self):
        return self.now


def bits(folder):
    """All contents by label, whatever the files are called."""
    dataset = datasets.Dataset(folder)
    return {
        (sample, site): dataset.read(sample, site).tobytes()
        for sample in dataset
        for site in dataset.sites
    }


def survive(folder, clock, deaths):
    """Run with one death after another, then to the end; return the number of deaths."""
    wanted, count = synthetic.plan(samples=7, unit_samples=3), 0
    for number, (step, how) in enumerate(deaths):
        clock.now += 61
        try:
            mortal = Mortal(folder.path, step, how)
            synthetic.extract(mortal, wanted, f"victim-{number}", lease=LEASE, clock=clock)
        except Killed:
            count += 1
    clock.now += 61
    synthetic.extract(folder, wanted, "heir", lease=LEASE, clock=clock)
    assert_labels_equal_contents(folder, wanted)
    report = verification.verify(folder)
    assert report.intact, report.problems
    return count


@pytest.fixture
def undisturbed(tmp_path):
    folder = LocalFolder(tmp_path / "undisturbed")
    synthetic.extract(folder, synthetic.plan(samples=7, unit_samples=3))
    return bits(folder)


@pytest.mark.parametrize("how", ["before", "after", "halfway"])
def test_a_crash_at_any_step_neither_loses_nor_duplicates_samples(tmp_path, undisturbed, how):
    deaths, step = 1, 0
    while deaths:
        step += 1
        folder = LocalFolder(tmp_path / f"{how}-{step}")
        deaths = survive(folder, Clock(), [(step, how)])
        assert bits(folder) == undisturbed
    assert step > 12, "the run has more steps than were tried"


def random_deaths(seed):
    chance = random.Random(seed)
    ways = ["before", "after", "halfway"]
    return [(chance.randint(1, 16), chance.choice(ways)) for _ in range(chance.randint(1, 6))]


def test_random_crashes_neither_lose_nor_duplicate_samples(tmp_path, undisturbed):
    for seed in range(20):
        folder = LocalFolder(tmp_path / str(seed))
        survive(folder, Clock(), random_deaths(seed))
        assert bits(folder) == undisturbed


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_a_thousand_random_crashes_neither_lose_nor_duplicate_samples(tmp_path, undisturbed):
    deaths = 0
    for seed in range(1_000):
        folder = LocalFolder(tmp_path / str(seed))
        deaths += survive(folder, Clock(), random_deaths(1_000 + seed))
        assert bits(folder) == undisturbed
    assert deaths >= 1_000


def test_a_stalled_worker_cannot_change_what_its_successor_wrote(tmp_path):
    folder, clock = LocalFolder(tmp_path), Clock()
    wanted = plans.write(folder, synthetic.plan(samples=3, unit_samples=3))
    sleeper = Units(folder, count=1, worker="sleeper", lease=LEASE, clock=clock)
    claim = sleeper.claim()
    clock.now += 61
    synthetic.extract(folder, wanted, "heir", lease=LEASE, clock=clock)
    before = bits(folder)
    files = synthetic.record(folder, wanted, claim)  # the sleeper writes its shard now …
    with pytest.raises(Fenced):
        sleeper.commit(claim, unit_writer.commit_outcome(wanted, 0, files))
    assert bits(folder) == before
    report = verification.verify(folder)
    assert report.intact
    assert report.leftovers == (files[0]["name"],)  # … which is waste, not data
    assert verification.delete_leftovers(folder) == [files[0]["name"]]
    assert verification.verify(folder).leftovers == ()

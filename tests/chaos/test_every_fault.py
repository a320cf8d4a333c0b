"""The program of `every_fault.py`, in short: one round with four faults, and as a slow test one
with a fault of each class. All of them at random:
`./test -m chaos tests/chaos/test_every_fault.py`, or for as long as you like
`python -m tests.chaos.every_fault --minutes 60`."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from tests.chaos import every_fault
from tests.chaos import faults as process_faults
from tests.chaos.chaos_run import MISSED, Missed
from tests.chaos.faults import agent_dies, job_is_cancelled, server_dies
from tests.chaos.machine_faults import (
    clock_of_hosts_is_set,
    clock_of_servers_is_set,
    database_restarts,
    disk_is_full,
    disk_is_read_only,
    job_is_cancelled_during_a_fault,
    network_is_partitioned,
    server_freezes_briefly,
)
from tests.chaos.own_postgres import OwnPostgres

ONE_OF_EACH_CLASS = (
    clock_of_servers_is_set,
    server_dies,
    disk_is_full,
    database_restarts,
    clock_of_hosts_is_set,
    network_is_partitioned,
    server_freezes_briefly,
    agent_dies,
    job_is_cancelled,
    disk_is_read_only,
    job_is_cancelled_during_a_fault,
)


@pytest.fixture
def postgres():
    postgres = OwnPostgres()
    yield postgres
    postgres.cleanup()


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(
            (server_dies, database_restarts, network_is_partitioned, agent_dies), id="four"
        ),
        pytest.param(ONE_OF_EACH_CLASS, id="one of each class", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_lost_doubled_or_left_after_several_faults(postgres, tmp_path, faults):
    counts: Counter[str] = Counter()
    every_fault.run_round(
        1, tmp_path, postgres, faults, counts, burst=4, steps=16, longest_pause=1.0
    )
    assert counts["(acknowledged jobs)"] == 8
    assert counts[MISSED] <= 1, counts  # a loaded machine may have nothing to hit


def test_faults_beside_another_do_not_hide_how_many_missed():
    counts = Counter({MISSED: 2, "server_dies": 8, "agent_dies (meanwhile)": 50})
    assert every_fault.missed_too_often(counts)
    assert not every_fault.missed_too_often(counts + Counter(server_dies=20))


def test_a_process_that_has_ended_is_no_hit():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    run = SimpleNamespace(random=random.Random(1), counts=Counter())

    def dies(run):
        return process_faults._kill_one(run, [ended.pid])

    with pytest.raises(Missed):
        dies(run)
    assert process_faults.meanwhile(run, [dies]) == "nothing else" and not run.counts


def test_the_long_partition_is_in_every_long_run():
    assert every_fault.long_faults(60, 0) and every_fault.long_faults(60, 20)
    assert not every_fault.long_faults(60, 1) and not every_fault.long_faults(5, 0)


def test_a_database_without_a_process_does_not_die():
    names = {each.__name__ for seed in range(50) for each in every_fault.choose(seed, 8, False)}
    assert "database_dies" not in names and len(names) == len(every_fault.EVERY_FAULT) - 1


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_workloads_end_in_a_partition_beyond_the_lease_of_agents(postgres, tmp_path):
    counts: Counter[str] = Counter()
    every_fault.run_round(6100, tmp_path, postgres, every_fault.LONG_FAULTS, counts)
    assert counts[MISSED] == 0, counts


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("store", ["postgres", "sqlite"])
@pytest.mark.parametrize("seed", range(6000, 6020))
def test_nothing_is_lost_doubled_or_left_whatever_happens(postgres, tmp_path, seed, store):
    faults = every_fault.choose(seed, 8, store == "postgres")
    counts: Counter[str] = Counter()
    every_fault.run_round(seed, tmp_path, postgres if store == "postgres" else None, faults, counts)
    assert counts[MISSED] <= 1, counts  # of eight

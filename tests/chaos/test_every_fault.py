"""The program of `every_fault.py`, in short: one round with four faults, and as a slow test one
with a fault of each class. All of them at random:
`./test -m chaos tests/chaos/test_every_fault.py`, or for as long as you like
`python -m tests.chaos.every_fault --minutes 60`."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.chaos import every_fault
from tests.chaos.chaos_run import MISSED
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
    assert counts[MISSED] == 0, counts


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("store", ["postgres", "sqlite"])
@pytest.mark.parametrize("seed", range(6000, 6020))
def test_nothing_is_lost_doubled_or_left_whatever_happens(postgres, tmp_path, seed, store):
    faults = random.Random(seed).choices(every_fault.EVERY_FAULT, k=8)
    counts: Counter[str] = Counter()
    every_fault.run_round(seed, tmp_path, postgres if store == "postgres" else None, faults, counts)
    assert counts[MISSED] <= 1, counts  # of eight

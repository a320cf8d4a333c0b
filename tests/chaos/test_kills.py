"""Servers, agents and workloads die at random moments, and every job finishes exactly once."""

from __future__ import annotations

import time

import pytest

from tests.chaos.chaos_run import ChaosJob
from tests.chaos.faults import (
    ALL_FAULTS,
    agent_dies,
    preempt,
    server_dies,
    stall_host,
    workload_dies,
)
from tests.server_process import wait_until
from tpufleet.controller.loop import LEASE_TTL


def weather(storm, blows=ALL_FAULTS, count=4, gap=2.5, within=150.0):
    """Two or three jobs, of one host and of two, and some blows."""
    random = storm.random
    works = [ChaosJob(id="one", step_seconds=random.uniform(0.1, 0.25))]
    works.append(ChaosJob(id="two", accelerator="v4-16", delay=random.uniform(0, 1.5)))
    if random.random() < 0.3:
        works.append(ChaosJob(id="three", accelerator="v5litepod-1", slices=2, steps=12))
    storm.submit(*works)
    storm.strike(blows, count=random.randint(2, count), gap=gap)
    storm.finish(within)


@pytest.mark.parametrize("seed", range(1))
def test_jobs_survive_a_blow_of_each_kind(storm, seed):
    storm = storm(seed)
    storm.submit(ChaosJob(id="one"), ChaosJob(id="two", accelerator="v4-16", steps=16, delay=0.5))
    for blow in storm.random.sample((server_dies, agent_dies, workload_dies, preempt), k=4):
        storm.strike([blow], count=1, gap=2)
    storm.finish(120)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_jobs_survive_whatever_dies_again_and_again(storm, seed):
    weather(storm(seed), count=8)


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2000, 2010))
def test_jobs_survive_hosts_that_only_seem_to_live(storm, seed):
    """A host that stalls is known by its silence alone, which takes a while."""
    weather(storm(seed), blows=(*ALL_FAULTS, stall_host, stall_host, stall_host), within=400.0)


def test_a_killed_server_comes_back_where_it_was_and_acts_at_once(storm):
    """Agents that outlived it call the old address; its own lease is not waited for."""
    server = storm(0).servers[0]
    before = server.url
    server.kill()
    server.start()
    assert server.url == before
    began = time.monotonic()
    wait_until(lambda: server.log_tail().count("took over as") == 2, 60, server.log_tail)
    assert time.monotonic() - began < LEASE_TTL.total_seconds()

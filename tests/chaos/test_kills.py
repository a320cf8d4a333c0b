"""Servers, agents and workloads die at random moments, and every job finishes exactly once."""

from __future__ import annotations

import re

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


def run_chaos(chaos_run, faults=ALL_FAULTS, count=4, gap=2.5, within=150.0):
    """Two or three jobs, of one host and of two, and some faults."""
    random = chaos_run.random
    works = [ChaosJob(id="one", step_seconds=random.uniform(0.1, 0.25))]
    works.append(ChaosJob(id="two", accelerator="v4-16", delay=random.uniform(0, 1.5)))
    if random.random() < 0.3:
        works.append(ChaosJob(id="three", accelerator="v5litepod-1", slices=2, steps=12))
    chaos_run.submit(*works)
    chaos_run.inject_faults(faults, count=random.randint(2, count), gap=gap)
    chaos_run.finish(within)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1))
def test_jobs_survive_a_blow_of_each_kind(chaos_run, seed):
    chaos_run = chaos_run(seed)
    chaos_run.submit(
        ChaosJob(id="one"), ChaosJob(id="two", accelerator="v4-16", steps=16, delay=0.5)
    )
    for fault in chaos_run.random.sample((server_dies, agent_dies, workload_dies, preempt), k=4):
        chaos_run.inject_faults([fault], count=1, gap=2)
    chaos_run.finish(120)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.chaos if seed else pytest.mark.slow)
        for seed in range(10)
    ],
)
def test_an_elastic_job_survives_a_storm(chaos_run, seed):
    """Process 0, which every attempt has, does each step once beyond its last checkpoint."""
    chaos_run = chaos_run(seed)
    chaos_run.submit(ChaosJob(id="one", accelerator="v5litepod-1", slices=3, least=1, steps=40))
    faults = (preempt, preempt, workload_dies, agent_dies)
    chaos_run.inject_faults(faults, count=4, gap=3)
    chaos_run.finish(400)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_jobs_survive_whatever_dies_again_and_again(chaos_run, seed):
    run_chaos(chaos_run(seed), count=8)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(2000, 2010))
def test_jobs_survive_hosts_that_only_seem_to_live(chaos_run, seed):
    """A host that stalls is known by its silence alone, which takes a while."""
    run_chaos(
        chaos_run(seed), faults=(*ALL_FAULTS, stall_host, stall_host, stall_host), within=400.0
    )


def test_a_killed_server_comes_back_where_it_was_and_acts_at_once(chaos_run):
    """Agents that outlived it call the old address; its own lease is not waited for."""
    server = chaos_run(0).servers[0]
    before = server.url
    server.kill()
    server.start()
    assert server.url == before
    wait_until(lambda: server.log_tail().count("took over as") == 2, 60, server.log_tail)
    tokens = re.findall(r"took over as \S+ with token (\d+)", server.log_tail())
    assert len(set(tokens)) == 1, tokens  # the lease did not change hands

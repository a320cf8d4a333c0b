"""Two servers on one Postgres: the one that acts dies, and the other goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests import postgres
from tests.chaos.chaos_run import ChaosJob, ChaosRun
from tests.chaos.faults import HOST_FAULTS
from tests.chaos.load_balancer import LoadBalancer
from tests.server_process import Server, wait_until
from tpufleet.controller.loop import LEASE_TTL
from tpufleet.errors import Unreachable
from tpufleet.stores.open_store import open_store
from tpufleet.stores.sql.database import DatabaseSession
from tpufleet.stores.sql.postgres import PostgresDatabase

# From the moment the lease is free until a busy machine gets round to looking.
LOOKS_WITHIN = 60.0  # of a machine that is busy


class Pair:
    def __init__(self, folder: Path, url: str, balancer: LoadBalancer | None) -> None:
        settings = {"TPUFLEET_STORE": url, "TPUFLEET_DATA": str(folder / "shared")}
        if balancer is not None:
            settings["TPUFLEET_PUBLIC_URL"] = balancer.url
        self.first = Server(folder / "first", timeout=30, **settings)
        self.second = Server(folder / "second", timeout=30, **settings)
        self.both = [self.first, self.second]
        self._balancer = balancer

    def start(self) -> None:
        self.first.start()
        self.second.start()
        if self._balancer is not None:
            self._balancer.servers = self.both


@pytest.fixture
def balancer() -> Iterator[LoadBalancer]:
    balancer = LoadBalancer()
    yield balancer
    balancer.close()


@pytest.fixture
def url() -> str:
    return postgres.fresh_url()


@pytest.fixture
def pair(tmp_path: Path, url: str, balancer: LoadBalancer) -> Iterator[Pair]:
    pair = Pair(tmp_path, url, balancer)
    yield pair
    for server in pair.both:
        server.cleanup()


@pytest.fixture
def lonely_pair(tmp_path: Path, url: str) -> Iterator[Pair]:
    """Agents know only the server that asked for their slice."""
    pair = Pair(tmp_path, url, None)
    yield pair
    for server in pair.both:
        server.cleanup()


@pytest.fixture
def store(url: str):
    store = open_store(url)
    yield store
    store.close()


def acts(server: Server) -> bool:
    return "took over as" in server.log_tail()


def acting_server_dies(chaos_run: ChaosRun, pair: Pair) -> None:
    """For good. The other takes over within the lease."""
    wait_until(
        lambda: acts(pair.first), 60, lambda: chaos_run.failure_report("the first server acts")
    )
    assert not acts(pair.second), chaos_run.failure_report("both act")
    pair.first.kill()
    chaos_run.servers.remove(pair.first)
    within = LEASE_TTL.total_seconds() + LOOKS_WITHIN
    wait_until(
        lambda: acts(pair.second),
        within,
        lambda: chaos_run.failure_report("the other server takes over"),
    )


def test_the_other_server_takes_over_and_running_attempts_go_on(pair, store, tmp_path):
    pair.start()
    chaos_run = ChaosRun(0, tmp_path, store, pair.both)
    chaos_run.submit(ChaosJob(id="one"), ChaosJob(id="two", accelerator="v4-16"))
    runs = lambda name: any(attempt.running_at for attempt in store.attempts(name))
    wait_until(
        lambda: runs("one") and runs("two"), 120, lambda: chaos_run.failure_report("both run")
    )
    acting_server_dies(chaos_run, pair)
    chaos_run.finish(180)
    assert [len(store.attempts(name)) for name in ("one", "two")] == [1, 1]


def test_a_server_that_freezes_in_a_transaction_does_not_keep_the_lease(url, store):
    now = datetime.now(UTC)
    assert store.acquire_lease("controller", "frozen", LEASE_TTL, now)
    locked, thawed = threading.Event(), threading.Event()
    failures: list[Exception] = []

    def renew(session: DatabaseSession) -> None:
        session.rows("SELECT holder FROM leases FOR UPDATE")
        locked.set()
        thawed.wait(900)

    def freeze() -> None:
        try:
            PostgresDatabase(url).write(renew)
        except Exception as error:
            failures.append(error)

    frozen = threading.Thread(target=freeze)
    frozen.start()
    assert locked.wait(900)
    began = time.monotonic()
    later = now + 2 * LEASE_TTL
    assert store.acquire_lease("controller", "other", LEASE_TTL, later).holder == "other"
    assert time.monotonic() - began < 2 * LEASE_TTL.total_seconds()
    thawed.set()
    frozen.join(900)
    assert [isinstance(error, Unreachable) for error in failures] == [True]


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(3000, 3020))
def test_jobs_survive_the_loss_of_the_acting_server(pair, store, tmp_path, seed):
    pair.start()
    chaos_run = ChaosRun(seed, tmp_path, store, pair.both)
    chaos_run.submit(
        ChaosJob(id="one", steps=40),
        ChaosJob(id="two", accelerator="v4-16", delay=chaos_run.random.uniform(0, 2)),
    )
    chaos_run.inject_faults(HOST_FAULTS, count=chaos_run.random.randint(0, 2), gap=3)
    acting_server_dies(chaos_run, pair)
    chaos_run.inject_faults(HOST_FAULTS, count=2, gap=3)
    chaos_run.finish(200)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(5000, 5010))
def test_a_server_that_slept_through_its_lease_does_no_harm(pair, balancer, store, tmp_path, seed):
    pair.start()
    chaos_run = ChaosRun(seed, tmp_path, store, pair.both)
    chaos_run.submit(
        ChaosJob(id="one", steps=60), ChaosJob(id="two", accelerator="v4-16", steps=60)
    )
    chaos_run.inject_faults(HOST_FAULTS, count=2, gap=2)
    pair.first.suspend()
    chaos_run.servers.reverse()
    balancer.servers = [pair.second, pair.first]
    within = LEASE_TTL.total_seconds() + LOOKS_WITHIN
    wait_until(
        lambda: acts(pair.second),
        within,
        lambda: chaos_run.failure_report("the other server takes over"),
    )
    chaos_run.inject_faults(HOST_FAULTS, count=1, gap=1)
    pair.first.resume()
    chaos_run.inject_faults(HOST_FAULTS, count=1, gap=3)
    chaos_run.finish(200)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(4000, 4003))
def test_jobs_survive_agents_that_cannot_reach_the_other_server(lonely_pair, store, tmp_path, seed):
    """Their hosts are silent, so they are lost, and new ones are had."""
    lonely_pair.start()
    chaos_run = ChaosRun(seed, tmp_path, store, lonely_pair.both)
    chaos_run.submit(ChaosJob(id="one", steps=60), ChaosJob(id="two", accelerator="v4-16"))
    chaos_run.watch(chaos_run.random.uniform(1, 6))
    acting_server_dies(chaos_run, lonely_pair)
    chaos_run.finish(300)

"""From a slice being lost to its replacement being asked for, with 1,000 running slices.

The real controller thread, the real heartbeat path and SQLite, in real time, over a cloud in memory
that takes a while to answer each call. Every host beats as often as the server asks it to.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import fleets
import servers
from reporting import Measure, report, run_benchmark
from tpufleet.clocks import SystemClock
from tpufleet.controller.loop import Controller
from tpufleet.controller.provider_calls import thread_executor
from tpufleet.model.fleet.agent_protocol import Heartbeat
from tpufleet.model.fleet.cloud_slices import CloudState, ExpectedSlice
from tpufleet.model.fleet.hosts import Host, NoticeKind
from tpufleet.model.fleet.slices import SliceId, TpuSlice
from tpufleet.providers.base import Order
from tpufleet.service.files.secrets import JobSecrets
from tpufleet.service.hosts.assignments import Assignments
from tpufleet.service.hosts.heartbeats import Heartbeats
from tpufleet.stores.base import Store
from tpufleet.stores.open_store import open_store

TYPE = "v5litepod-16"  # 4 hosts
PATIENCE = 60.0


class SlowCloud(fleets.FakeProvider):
    """Notes when a replacement is asked for; every call takes a while, as over a network."""

    def __init__(self, clock: SystemClock, latency: float) -> None:
        super().__init__(clock, name=fleets.PROVIDER, zones=fleets.ZONES)
        self.latency = latency
        self.asked: dict[str, float] = {}  # job → moment
        self._noting = threading.Lock()

    def request(self, order: Order) -> None:
        with self._noting:
            self.asked.setdefault(str(order.job_id), time.monotonic())
        time.sleep(self.latency)
        super().request(order)

    def release(self, slice_id: SliceId, zone: str) -> None:
        time.sleep(self.latency)
        super().release(slice_id, zone)

    def listing(self, expected: Collection[ExpectedSlice] = ()) -> Sequence:
        found = super().listing(expected)
        time.sleep(self.latency)
        return found


class Fleet:
    """1,000 running jobs, and the hosts that beat for them."""

    def __init__(self, home: Path, latency: float, slices: int) -> None:
        now = fleets.now()
        self.rows = fleets.Rows()
        fleets.running(self.rows, slices, TYPE, now)
        self.store: Store = open_store(f"sqlite:///{home / 'fleet.db'}")
        fleets.put(self.rows, self.store, now)
        clock = SystemClock()
        self.cloud = SlowCloud(clock, 0.0)
        fleets.build_machines(self.cloud, self.rows.slices)
        self.cloud.asked.clear()
        self.cloud.latency = latency
        self._executor: ThreadPoolExecutor = thread_executor()
        self.controller = Controller(
            self.store,
            {fleets.PROVIDER: self.cloud},
            clock,
            executor=self._executor,
            holder="bench",
            fleet="bench",
            server_url="http://127.0.0.1",
            slice_token=lambda slice_id: f"token of {slice_id}",
            bootstrap_token=lambda slice_id: f"bootstrap token of {slice_id}",
        )
        secrets = JobSecrets(self.store, [b"k" * 32], clock)
        assignments = Assignments(self.store, secrets, b"secret")
        self.beats = Heartbeats(self.store, assignments, self.controller.wake)
        self.lost: dict[str, float] = {}  # job → moment
        self._silent: set[SliceId] = set()
        self._notices: dict[SliceId, NoticeKind] = {}
        self._hosts: dict[SliceId, list[Host]] = {}
        for host in self.rows.hosts:
            self._hosts.setdefault(host.slice_id, []).append(host)

    @contextlib.asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        self.controller.start()
        tasks = [
            asyncio.create_task(self.beats.flush_forever()),
            asyncio.create_task(self._beat_for_ever()),
        ]
        await asyncio.sleep(3.0)  # it has taken over and listed
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.controller.stop()
            self._executor.shutdown()
            self.store.close()

    async def _beat_for_ever(self) -> None:
        """Each host in turn, at the interval that the server asks for."""
        interval = timedelta(seconds=1)
        while True:
            began = time.monotonic()
            for done, host in enumerate(self.rows.hosts, 1):
                if host.slice_id not in self._silent:
                    interval = await self._beat(host)
                due = began + interval.total_seconds() * done / len(self.rows.hosts)
                if (wait := due - time.monotonic()) > 0:
                    await asyncio.sleep(wait)

    async def _beat(self, host: Host) -> timedelta:
        now = fleets.now()
        reply = await self.beats.receive(
            Heartbeat(
                host_id=host.id,
                boot=host.boot,
                at=now,
                address=host.address,
                coordinator_port=host.coordinator_port,
                phase=host.phase,
                attempt_id=host.attempt_id,
                notice=self._notices.get(host.slice_id),
                progress=fleets.progress(2, now),
            ),
            host.slice_id,
            now,
        )
        return reply.next_heartbeat

    async def give_notice(self, tpu_slice: TpuSlice) -> None:
        """The metadata server of each host says so, and the agents report it at once."""
        self.lost[str(tpu_slice.job_id)] = time.monotonic()
        self._notices[tpu_slice.id] = NoticeKind.PREEMPTED  # later beats say it too
        await asyncio.gather(*(self._beat(host) for host in self._hosts[tpu_slice.id]))

    async def take_away(self, tpu_slice: TpuSlice) -> None:
        """Without a word: only the next listing shows it."""
        self.lost[str(tpu_slice.job_id)] = time.monotonic()
        machine = self.cloud.find(tpu_slice.id)
        assert machine is not None
        machine.state = CloudState.PREEMPTED
        self._silent.add(tpu_slice.id)

    async def until_replaced(self) -> list[float]:
        """Seconds from each loss to the request for its replacement, shortest first."""
        deadline = time.monotonic() + PATIENCE
        while not set(self.lost) <= set(self.cloud.asked):
            missing = len(set(self.lost) - set(self.cloud.asked))
            assert time.monotonic() < deadline, f"{missing} replacements were never asked for"
            await asyncio.sleep(0.05)
        return sorted(self.cloud.asked[job] - moment for job, moment in self.lost.items())


async def one_after_another(
    fleet: Fleet, lose: Callable[[TpuSlice], object], count: int
) -> list[float]:
    """At random moments, ten a second."""
    chance = random.Random(7)
    async with fleet.alive():
        for tpu_slice in chance.sample(fleet.rows.slices, count):
            await lose(tpu_slice)  # type: ignore[misc]
            await asyncio.sleep(chance.expovariate(10.0))
        return await fleet.until_replaced()


async def all_at_once(fleet: Fleet, lose: Callable[[TpuSlice], object], count: int) -> list[float]:
    async with fleet.alive():
        chosen = random.Random(8).sample(fleet.rows.slices, count)
        await asyncio.sleep(random.Random().uniform(0, 5))  # any moment between two listings
        await asyncio.gather(*(lose(tpu_slice) for tpu_slice in chosen))  # type: ignore[arg-type]
        return await fleet.until_replaced()


def measure(latency: float, slices: int, count: int, at_once: int) -> dict[str, list[float]]:
    results: dict[str, list[float]] = {}
    for name, how, single in (
        ("notice", "give_notice", True),
        ("listing", "take_away", True),
        ("many by notice", "give_notice", False),
        ("many by listing", "take_away", False),
    ):
        with servers.state_folder() as home:
            fleet = Fleet(home, latency, slices)
            lose = getattr(fleet, how)
            run = (
                one_after_another(fleet, lose, count)
                if single
                else all_at_once(fleet, lose, at_once)
            )
            results[name] = asyncio.run(run)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", type=int, default=200, help="lost one after another")
    parser.add_argument("--slices", type=int, default=1_000, help="running slices")
    parser.add_argument("--at-once", type=int, default=200, help="lost at the same moment")
    parser.add_argument("--latency", type=float, default=0.5, help="of the cloud, seconds a call")
    options = parser.parse_args()
    took = measure(options.latency, options.slices, options.losses, options.at_once)
    p99 = {name: values[len(values) * 99 // 100] for name, values in took.items()}
    report(
        "recovery",
        [
            Measure(
                name="notice → replacement asked for, p99",
                ours=p99["notice"],
                unit="s",
                goal=1,
                anchor=15,
                peer="SkyPilot, 15 to 240 s",
            ),
            Measure(
                name="without notice, found by listing, p99",
                ours=p99["listing"],
                unit="s",
                goal=10,
                anchor=150,
                peer="dstack",
            ),
            Measure(
                name=f"{options.at_once} lost at once, all replacements asked for",
                ours=took["many by notice"][-1],
                unit="s",
                goal=5,
                anchor=27 * 60,
                peer="SkyPilot, estimate",
            ),
            Measure(
                name="the same without notice, found by listing",
                ours=took["many by listing"][-1],
                unit="s",
            ),
            Measure(name="notice, median", ours=took["notice"][len(took["notice"]) // 2], unit="s"),
            Measure(
                name="without notice, median",
                ours=took["listing"][len(took["listing"]) // 2],
                unit="s",
            ),
        ],
        slices=options.slices,
        cloud_latency_s=options.latency,
    )


if __name__ == "__main__":
    run_benchmark(main)

"""Load of many agents: each sends heartbeats at the interval that the server sets, and keeps its
connection unless the server closes it.

A separate process, so that the server is measured alone. It speaks HTTP over plain sockets, because
ten thousand real agents would need more CPU than the server under test. Each agent has an address
of its own in 127.0.0.0/8, as hosts have.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

import fleets
from tpufleet.model.fleet.agent_protocol import Heartbeat
from tpufleet.model.fleet.hosts import Host
from tpufleet.model.values.encoding import to_json
from tpufleet.service.transport import auth
from tpufleet.stores.open_store import open_store


class Assigned(msgspec.Struct):
    attempt_id: str


class Answer(msgspec.Struct):
    next_heartbeat: timedelta
    assignment: Assigned | None


@dataclass
class Tally:
    """What the agents saw."""

    took: list[float] = field(default_factory=list)  # milliseconds of each heartbeat
    errors: list[str] = field(default_factory=list)
    interval: float = 0.0  # longest interval that the server requested, in seconds
    reconnects: int = 0  # connections that the server closed after a reply
    silenced: str = ""  # the attempt of the agent that stopped at the end


class Agent:
    def __init__(
        self, number: int, host: Host, token: str, servers: Sequence[str], tally: Tally
    ) -> None:
        self._host = host
        self._servers = servers
        self._number = number
        self._local = f"127.{1 + number // 62500 % 250}.{number // 250 % 250}.{1 + number % 250}"
        self._token = token
        self._failures = 0
        self._head = (
            f"POST /api/v1/agent/heartbeat HTTP/1.1\r\nHost: fleet\r\n"
            f"Authorization: Bearer {token}\r\nContent-Type: application/json\r\n"
        )
        self._tally = tally
        self._step = 1

    async def run(self, first_after: float) -> None:
        await asyncio.sleep(first_after)
        while True:
            try:
                await self._send_heartbeats()
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                self._tally.errors.append(repr(error))
                self._failures += 1  # the next server, as behind a load balancer
                await asyncio.sleep(1.0)

    async def _send_heartbeats(self) -> None:
        """On one connection, for as long as the server keeps it."""
        began, keeps = time.perf_counter(), True
        address = urlsplit(self._servers[(self._number + self._failures) % len(self._servers)])
        reader, writer = await asyncio.open_connection(
            address.hostname, address.port, limit=8192, local_addr=(self._local, 0)
        )
        try:
            while keeps:
                sent, began = began or time.perf_counter(), 0.0
                writer.write(self._message())
                answer, keeps = await _answer(reader)
                self._tally.took.append((time.perf_counter() - sent) * 1000)
                if answer.assignment is None or (
                    answer.assignment.attempt_id != self._host.attempt_id
                ):
                    raise ValueError(f"{self._host.id} got the assignment {answer.assignment}")
                wait = answer.next_heartbeat.total_seconds()
                self._tally.interval = max(self._tally.interval, wait)
                self._tally.reconnects += not keeps
                if not keeps:
                    writer.close()
                await asyncio.sleep(wait - (time.perf_counter() - sent))
        finally:
            writer.close()

    def _message(self) -> bytes:
        self._step += 1
        now = fleets.now()
        body = to_json(
            Heartbeat(
                host_id=self._host.id,
                boot=self._host.boot,
                at=now,
                address=self._host.address,
                coordinator_port=self._host.coordinator_port,
                phase=self._host.phase,
                attempt_id=self._host.attempt_id,
                progress=fleets.progress(self._step, now),
            )
        )
        return f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body


_decode = msgspec.json.Decoder(Answer).decode


async def _answer(reader: asyncio.StreamReader) -> tuple[Answer, bool]:
    """And whether the server keeps the connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
    body = await reader.readexactly(length)
    if not head.startswith(b"http/1.1 200"):
        raise ValueError(body.decode(errors="replace")[:200])
    return _decode(body), b"connection: close" not in head


async def run_agents(
    home: Path,
    servers: Sequence[str],
    seconds: float,
    spread: float,
    store_url: str | None = None,
    part: tuple[int, int] = (0, 1),
    *,
    report: Callable[[Tally], None],
    goes_on: bool = False,
) -> None:
    """`spread`: the first heartbeats are sent within this many seconds. `part`: this process sends
    the heartbeats of every n-th host. `goes_on`: until it is killed, less the first host, which
    then falls silent."""
    secret = (home / "secret").read_text().strip().encode()
    store = open_store(store_url or f"sqlite:///{home / 'fleet.db'}")
    hosts = list(enumerate(store.live().hosts))[part[0] :: part[1]]
    store.close()
    chance, tally = random.Random(part[0] + 1), Tally()
    agents = [
        Agent(number, host, auth.slice_token(secret, host.slice_id), servers, tally)
        for number, host in hosts
    ]
    print("ready", flush=True)
    tasks = [asyncio.create_task(agent.run(chance.uniform(0, spread))) for agent in agents]
    await asyncio.sleep(spread)  # all agents are connected
    tally.took.clear()
    await asyncio.sleep(seconds)
    if goes_on and part[0] == 0:
        tasks[0].cancel()
        tally.silenced = hosts[0][1].attempt_id or ""
    report(tally)
    if goes_on:
        await asyncio.Event().wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def raise_descriptor_limit() -> None:
    """For one connection of each agent, as far as this user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (max(hard, 120_000), hard):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
            return
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("home", type=Path)
    parser.add_argument("servers", help="URLs, separated by commas")
    parser.add_argument("--store", help="URL; default: SQLite in the state folder")
    parser.add_argument("--part", type=int, default=0, help="of the hosts")
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--goes-on", action="store_true", help="after the report, until killed")
    parser.add_argument("--times", action="store_true", help="print the time of each heartbeat")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--spread", type=float, required=True)
    options = parser.parse_args()
    os.nice(5)
    raise_descriptor_limit()

    def report(tally: Tally) -> None:
        took = sorted(tally.took) or [0.0]
        result: dict[str, object] = {
            "heartbeats": len(tally.took),
            "median_ms": took[len(took) // 2],
            "p99_ms": took[len(took) * 99 // 100],
            "longest_ms": took[-1],
            "errors": len(tally.errors),
            "first_errors": tally.errors[:3],
            "interval_s": tally.interval,
            "reconnects": tally.reconnects,
            "silenced": tally.silenced,
            "cpu_s": time.process_time(),
        }
        if options.times:
            result["times_ms"] = [round(each, 2) for each in tally.took]
        print(json.dumps(result), flush=True)

    asyncio.run(
        run_agents(
            options.home,
            options.servers.split(","),
            options.seconds,
            options.spread,
            options.store,
            (options.part, options.parts),
            report=report,
            goes_on=options.goes_on,
        )
    )


if __name__ == "__main__":
    main()

"""Load of many agents: each keeps one connection and sends heartbeats at the server's interval.

A separate process, so that the server is measured alone. It speaks HTTP over plain sockets, because
ten thousand real agents would need more CPU than the server under test.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

import fleets
from tpufleet.model.agent_protocol import Heartbeat
from tpufleet.model.encoding import to_json
from tpufleet.model.hosts import Host
from tpufleet.service import auth
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


class Agent:
    def __init__(self, host: Host, token: str, server: str, tally: Tally) -> None:
        self._host = host
        self._address = urlsplit(server)
        self._head = (
            f"POST /api/v1/agent/beat HTTP/1.1\r\nHost: {self._address.netloc}\r\n"
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
                await asyncio.sleep(1.0)

    async def _send_heartbeats(self) -> None:
        reader, writer = await asyncio.open_connection(
            self._address.hostname, self._address.port, limit=8192
        )
        try:
            while True:
                sent = time.perf_counter()
                writer.write(self._message())
                answer = await _answer(reader)
                self._tally.took.append((time.perf_counter() - sent) * 1000)
                if answer.assignment is None or (
                    answer.assignment.attempt_id != self._host.attempt_id
                ):
                    raise ValueError(f"{self._host.id} got the assignment {answer.assignment}")
                wait = answer.next_heartbeat.total_seconds()
                self._tally.interval = max(self._tally.interval, wait)
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


async def _answer(reader: asyncio.StreamReader) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
    body = await reader.readexactly(length)
    if not head.startswith(b"http/1.1 200"):
        raise ValueError(body.decode(errors="replace")[:200])
    return _decode(body)


async def run_agents(home: Path, server: str, seconds: float, spread: float) -> Tally:
    """`spread`: the first heartbeats are sent within this many seconds."""
    secret = (home / "secret").read_text().strip().encode()
    store = open_store(f"sqlite:///{home / 'fleet.db'}")
    hosts = store.live().hosts
    store.close()
    chance, tally = random.Random(1), Tally()
    agents = [Agent(host, auth.slice_token(secret, host.slice_id), server, tally) for host in hosts]
    tasks = [asyncio.create_task(agent.run(chance.uniform(0, spread))) for agent in agents]
    await asyncio.sleep(spread)  # all agents are connected
    tally.took.clear()
    await asyncio.sleep(seconds)
    counted = Tally(list(tally.took), list(tally.errors), tally.interval)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("home", type=Path)
    parser.add_argument("server")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--spread", type=float, required=True)
    options = parser.parse_args()
    os.nice(5)
    tally = asyncio.run(run_agents(options.home, options.server, options.seconds, options.spread))
    took = sorted(tally.took) or [0.0]
    print(
        json.dumps(
            {
                "heartbeats": len(tally.took),
                "median_ms": took[len(took) // 2],
                "p99_ms": took[len(took) * 99 // 100],
                "longest_ms": took[-1],
                "errors": len(tally.errors),
                "first_errors": tally.errors[:3],
                "interval_s": tally.interval,
                "cpu_s": time.process_time(),
            }
        )
    )


if __name__ == "__main__":
    main()

"""The web page: first paint and queries with many jobs, and event streams of many browsers.

The first paint is measured in Chromium, without a cache: from the request of the address to the
paint with the rows of the newest jobs. It needs Playwright (in the test requirements) and Chromium;
without them, the other figures are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

import listing
import servers
from reporting import Measure, report, run_benchmark
from tpufleet.client.fleet import FleetClient
from tpufleet.model.api_types import JobChanges

JOBS_AT_SCALE_1 = listing.RUNNING + listing.WAITING + listing.ENDED
QUERIES = {
    "the newest 100": "",
    "by owner and state": "owner:person-7 state:succeeded",
    "by tag": "tag:sweep-42",
    "by text": "train-31*",
}
ROWS_SHOWN = """() => new Promise(done => {
  const look = () => document.querySelectorAll('table.jobs tbody tr').length
    ? requestAnimationFrame(() => setTimeout(() => done(performance.now())))
    : setTimeout(look, 2);
  look();
})"""


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    """The median; the first time does not count."""
    _, median = listing.milliseconds(work, rounds + 1)
    return median


def first_paint(server: servers.Server, rounds: int) -> tuple[float, float] | None:
    """The first contentful paint, and the paint with rows, in milliseconds: medians."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        print("the first paint is not measured: needs Playwright and Chromium", flush=True)
        return None
    sandbox = [] if os.geteuid() else ["--no-sandbox"]
    contentful, complete = [], []
    with sync_playwright() as playwright, FleetClient(server.url, server.token) as client:
        browser = playwright.chromium.launch(executable_path=chromium, args=sandbox)
        with browser.new_context() as context:
            page = context.new_page()
            page.goto(server.url + client.login_link().path)
            page.locator("table.jobs").wait_for()
            logged_in = context.storage_state()
        for _ in range(rounds + 1):
            with browser.new_context(storage_state=logged_in) as context:
                page = context.new_page()
                page.goto(server.url, wait_until="commit")
                complete.append(float(page.evaluate(ROWS_SHOWN)))
                entry = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
                contentful.append(float(page.evaluate(entry)))
        browser.close()
    return statistics.median(contentful[1:]), statistics.median(complete[1:])


class Browsers:
    """Open event streams, each as a browser holds one. They count what they receive."""

    def __init__(self, server: servers.Server, count: int) -> None:
        self._server, self._count = server, count
        self.received = [0] * count
        self.connected = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Browsers:
        self._thread.start()
        _until(lambda: self.connected == self._count, "all streams are open")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        tasks = [asyncio.create_task(self._listen(index)) for index in range(self._count)]
        while not self._stop.is_set():
            await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self, index: int) -> None:
        url = httpx.URL(self._server.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(
            f"GET /api/v1/stream HTTP/1.1\r\nHost: {url.host}\r\n"
            f"Authorization: Bearer {self._server.token}\r\n\r\n".encode()
        )
        await writer.drain()
        async for line in reader:
            if line.startswith(b": connected"):
                self.connected += 1
            elif line.startswith(b"event: event"):
                self.received[index] += 1


def fan_out(
    server: servers.Server, browsers: int, seconds: float, rate: float
) -> tuple[float, float]:
    """Cores of the server while jobs change, and the time until all browsers know of a change."""
    with FleetClient(server.url, server.token) as client:
        job = client.jobs(limit=1).jobs[0].id
        with Browsers(server, browsers) as opened:
            delays: list[float] = []
            time.sleep(1.0)
            cpu, began, changes = server.cpu_seconds, time.monotonic(), 0
            before = sum(opened.received)
            while time.monotonic() - began < seconds:
                changes += 1
                started = time.monotonic()
                known = min(opened.received)
                client.change_job(job, JobChanges(notes=f"change {changes}"))
                _until(lambda known=known: min(opened.received) > known, "everybody knows")
                delays.append(time.monotonic() - started)
                time.sleep(max(0.0, began + changes / rate - time.monotonic()))
            elapsed = time.monotonic() - began
            cores = (server.cpu_seconds - cpu) / elapsed
            assert sum(opened.received) - before >= changes * browsers
    return cores, statistics.median(delays) * 1000


def _until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--browsers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=5.0, help="changes a second")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    measures: list[Measure] = []
    for count in options.jobs:
        with servers.state_folder() as home:
            measures += measure(home, count, options, fleet=count == options.jobs[0])
    report("web", measures)


def measure(home: Path, count: int, options: argparse.Namespace, *, fleet: bool) -> list[Measure]:
    listing.prepare(f"sqlite:///{home / 'fleet.db'}", count / JOBS_AT_SCALE_1)
    measures = []
    with (
        servers.fake_cloud_server(home, stock=0) as server,
        httpx.Client(
            base_url=server.url, headers={"Authorization": f"Bearer {server.token}"}
        ) as http,
    ):
        with FleetClient(server.url, server.token) as client:
            listing.settle(client)
        painted = first_paint(server, options.rounds)
        if painted is not None:
            first, rows = painted
            name = f"the newest of {count:,} jobs on the screen"
            measures.append(Measure(name=name, ours=rows, unit="ms", goal=1000))
            measures.append(Measure(name="first contentful paint of it", ours=first, unit="ms"))
        for what, query in QUERIES.items():
            address = f"/api/v1/jobs?limit=100&q={query}"
            measures.append(
                Measure(
                    name=f"{what} of {count:,} jobs",
                    ours=milliseconds(lambda at=address: http.get(at), options.rounds),
                    unit="ms",
                    goal=100,
                )
            )
        if fleet:
            cores, delay = fan_out(server, options.browsers, options.seconds, options.rate)
            name = f"{options.browsers} browsers, {options.rate:g} changes a second"
            measures.append(Measure(name=name, ours=cores, unit="cores", goal=0.5))
            name = f"until all {options.browsers} have a change"
            measures.append(Measure(name=name, ours=delay, unit="ms"))
    return measures


if __name__ == "__main__":
    run_benchmark(main)

"""The real server as a process of its own, over a cloud in memory.

Run as a program it serves; imported, it starts that program and measures it from outside. The
cloud owns whatever slices the store holds, so a fleet can be prepared in the database.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

STARTS_WITHIN = 60.0


@dataclass(frozen=True, kw_only=True)
class Server:
    home: Path
    url: str
    token: str
    process: psutil.Process

    @property
    def memory_mb(self) -> float:
        """Resident, as the kernel counts it."""
        return self.process.memory_info().rss / 1e6

    @property
    def cpu_seconds(self) -> float:
        used = self.process.cpu_times()
        return used.user + used.system


@contextlib.contextmanager
def state_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tpufleet-bench-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def fake_cloud_server(
    home: Path, *, stock: int | None = None, store: str | None = None
) -> Iterator[Server]:
    """`stock`: slices of each type and zone; None: plenty. `store`: None: SQLite."""
    command = [sys.executable, __file__, str(home)]
    command += [] if stock is None else ["--stock", str(stock)]
    command += [] if store is None else ["--store", store]
    with started(command, home) as server:
        yield server


@contextlib.contextmanager
def plain_server(home: Path) -> Iterator[Server]:
    """`tpu serve`, as anybody would start it."""
    with started([sys.executable, "-m", "tpufleet", "serve"], home) as server:
        yield server


@contextlib.contextmanager
def started(command: list[str], home: Path) -> Iterator[Server]:
    home.mkdir(exist_ok=True)
    environment = {**os.environ, "TPUFLEET_HOME": str(home), "TPUFLEET_CONFIG": os.devnull}
    with open(home / "bench.log", "wb") as log:
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        url = _until_serving(child, home)
        token = (home / "token").read_text().strip()
        yield Server(home=home, url=url, token=token, process=psutil.Process(child.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _until_serving(child: subprocess.Popen[bytes], home: Path) -> str:
    deadline = time.monotonic() + STARTS_WITHIN
    described = home / "server.json"
    while time.monotonic() < deadline:
        if child.poll() is not None:
            break
        with contextlib.suppress(OSError, ValueError):
            return str(json.loads(described.read_text())["url"])
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start:\n{(home / 'bench.log').read_text()[-2000:]}")


def serve(home: Path, stock: int | None, store_url: str | None) -> None:
    import logging

    import fleets
    from tpufleet.clocks import SystemClock
    from tpufleet.compose import control_plane
    from tpufleet.config import Config
    from tpufleet.model.tpu import type_lookup
    from tpufleet.stores.open_store import open_store

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    settings = Config(
        home=home,
        config_file=home / "config.yaml",
        providers=(fleets.PROVIDER,),
        store=store_url,
    )
    cloud = fleets.FakeProvider(SystemClock(), name=fleets.PROVIDER, zones=fleets.ZONES)
    with contextlib.closing(open_store(settings.store_url)) as store:
        fleets.build_machines(cloud, store.slices())
        if stock is not None:
            cloud.stock = {
                (zone, name): stock for zone in fleets.ZONES for name in type_lookup.all_types()
            }
        control_plane.ControlPlane(settings, store, {fleets.PROVIDER: cloud}).run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("home", type=Path)
    parser.add_argument("--stock", type=int)
    parser.add_argument("--store")
    options = parser.parse_args()
    serve(options.home, options.stock, options.store)

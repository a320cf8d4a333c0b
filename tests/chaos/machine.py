"""Everything around the servers of a chaos run that can fail: their clocks, disk, network and
database."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.certificates import make_certificate
from tests.chaos import preload
from tests.chaos.load_balancer import LoadBalancer
from tests.chaos.own_postgres import OwnPostgres
from tests.chaos.read_only_disk import ReadOnlyDisk
from tests.chaos.small_disk import SmallDisk
from tests.chaos.stepped_clock import SteppedClock
from tests.server_process import Server
from tpufleet.stores.base import Store
from tpufleet.stores.open_store import open_store


class Machine:
    """Two servers with TLS on a Postgres of their own, or one on SQLite, behind a proxy, with their
    state on a small disk."""

    def __init__(self, folder: Path, *, postgres: OwnPostgres | None) -> None:
        self.postgres = postgres
        self.clock = SteppedClock(folder)
        self.disk = SmallDisk(folder / "disk")
        self.read_only = ReadOnlyDisk(folder, self.disk.folder)
        self.balancer = LoadBalancer(rotate=True)
        self._temporary = folder / "temporary"
        self._temporary.mkdir()
        self._temporary.chmod(0o1777)
        settings = {
            **preload.environment(
                [self.clock.library, self.read_only.library],
                **self.clock.variables,
                **self.read_only.variables,
            ),
            "TPUFLEET_PUBLIC_URL": self.balancer.url,
            "TPUFLEET_DATA": str(self.disk.folder / "data"),
            "TPUFLEET_PROVIDERS": "local",
            "TMPDIR": str(self._temporary),
        }
        self.url = f"sqlite:///{self.disk.folder / 'first' / 'fleet.db'}"
        names = ["first"]
        if postgres is not None:
            certificate = make_certificate(folder)
            settings |= {
                "TPUFLEET_PUBLIC_URL": self.balancer.url.replace("http://", "https://"),
                "TPUFLEET_TLS_CERT": str(certificate.cert),
                "TPUFLEET_TLS_KEY": str(certificate.key),
                "TPUFLEET_CA_FILE": str(certificate.cert),
            }
            self.url = postgres.fresh_url()
            settings["TPUFLEET_STORE"] = self.url
            names.append("second")
        self.servers = [Server(self.disk.folder / name, timeout=30, **settings) for name in names]
        self.balancer.servers = self.servers
        # Jobs run as another user, so they need a way to what they write.
        for path in (folder, *folder.parents):
            if path.owner() == "root" and not path.stat().st_mode & 0o001:
                path.chmod(path.stat().st_mode | 0o011)

    def start(self) -> None:
        for server in self.servers:
            server.start()

    @contextmanager
    def locked_database(self) -> Iterator[None]:
        """Another program holds the SQLite database, as a backup may."""
        connection = sqlite3.connect(self.url.removeprefix("sqlite:///"), isolation_level=None)
        try:
            connection.execute("PRAGMA busy_timeout = 10000")
            connection.execute("BEGIN IMMEDIATE")
            yield
            connection.execute("ROLLBACK")
        finally:
            connection.close()

    def leftovers(self) -> list[str]:
        """What the servers and their hosts left outside of their state folders."""
        files = [str(path) for path in self._temporary.iterdir()]
        walked = os.walk(self.disk.folder)  # folders may be deleted meanwhile
        paths = (Path(folder, name) for folder, _, names in walked for name in names)
        sockets = [str(path) for path in paths if path.is_socket()]
        return [*files, *sockets]

    def cleanup(self) -> None:
        with ExitStack() as stack:
            stack.callback(self.disk.cleanup)
            stack.callback(self.balancer.close)
            for server in self.servers:
                stack.callback(server.cleanup)


@contextmanager
def open_machine(folder: Path, *, postgres: OwnPostgres | None) -> Iterator[tuple[Machine, Store]]:
    machine = Machine(folder, postgres=postgres)
    try:
        machine.start()
        store = open_store(machine.url)
        try:
            yield machine, store
        finally:
            store.close()
    finally:
        machine.cleanup()

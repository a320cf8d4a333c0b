"""A Postgres of its own, which can be stopped, killed and frozen."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import tempfile
from pathlib import Path

import psutil

from tests import postgres
from tests.polling import wait_until


class OwnPostgres:
    def __init__(self) -> None:
        module = postgres.module()
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-pg-", dir="/tmp"))
        self._data = self.folder / "data"
        server = module.get_server(self._data, cleanup_mode=None)
        self._binaries = Path(server.bin_path)
        self._user = server.system_user
        self._sockets = Path(server.get_postmaster_info().socket_dir)
        self._url = server.get_uri()

    def fresh_url(self) -> str:
        """An empty schema of its own."""
        return postgres.with_schema(self._url)

    def start(self) -> None:
        self._pg_ctl("-w", "-t", "60", "-o", f'-h "" -k {self._sockets}', "start")

    def stop(self) -> None:
        """As a package upgrade does: connections are cut, what was committed is written."""
        self._pg_ctl("-w", "-m", "fast", "stop")

    def kill(self) -> None:
        """As a power cut does; the next start recovers from the log."""
        family = self._processes()
        for process in family:
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(family, timeout=900)

    def suspend(self) -> None:
        for process in self._processes():
            _signal(process, signal.SIGSTOP)

    def resume(self) -> None:
        for process in self._processes():
            _signal(process, signal.SIGCONT)

    def cleanup(self) -> None:
        if self._processes():
            self.resume()
            self.kill()
        wait_until(lambda: not self._processes(), 30, "postgres has ended")
        subprocess.run(["rm", "-rf", str(self.folder)], check=True)

    def _processes(self) -> list[psutil.Process]:
        try:
            pid = int((self._data / "postmaster.pid").read_text().split()[0])
            postmaster = psutil.Process(pid)
            if "postgres" not in postmaster.name():
                return []  # the number was given to another process
            return [postmaster, *postmaster.children(recursive=True)]
        except (FileNotFoundError, IndexError, psutil.NoSuchProcess):
            return []

    def _pg_ctl(self, *arguments: str) -> None:
        user = None if self._user is None else pwd.getpwnam(self._user)
        command = [str(self._binaries / "pg_ctl"), "-D", str(self._data)]
        with (self.folder / "pg_ctl.log").open("ab") as log:
            subprocess.run(
                [*command, "-l", str(self._data / "log"), *arguments],
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
                **({} if user is None else {"user": user.pw_uid, "group": user.pw_gid}),
            )


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return

"""A server process and an emulated cloud whose nodes run real agents."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.polling import Patience
from tests.views.cli_runner import Tpu
from tpufleet.providers.local import processes
from tpufleet_testbed.cloud_tpu.emulator import Emulator

WORKLOAD = Path(__file__).parent / "workload"


class Fleet:
    def __init__(
        self,
        folder: Path,
        zones: tuple[str, ...],
        environ: Mapping[str, str] | None = None,
        settings: Mapping[str, str] | None = None,
        provider: str = "tpu-vm",
        **emulator: Any,
    ) -> None:
        self.folder, self.provider = folder, provider
        self.emulator = Emulator(zones=zones, agents_folder=folder / "machines", **emulator)
        self.emulator.start()
        self.zones = zones
        home = folder / "state"
        home.mkdir(parents=True)
        self.tpu = Tpu(
            HOME=str(folder),
            TPUFLEET_HOME=str(home),
            TPUFLEET_PROVIDER=provider,
            **(environ or {}),
            **{
                f"TPUFLEET_{provider.upper().replace('-', '_')}": json.dumps(
                    {
                        "project": "my-project",
                        "zones": zones,
                        "endpoint": self._endpoint(),
                        "gang_patience": "5s",
                        **(settings or {}),
                    }
                )
            },
        )
        self._log = (folder / "server.log").open("a")
        self._start_server()

    def _endpoint(self) -> str:
        compute = self.provider == "compute"
        return self.emulator.project.url if compute else self.emulator.endpoint

    def _start_server(self) -> None:
        home = self.folder / "state"
        (home / "server.json").unlink(missing_ok=True)
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tpufleet", "serve"],
            env={**os.environ, **self.tpu.environ},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.until(lambda: (home / "server.json").exists(), "the server starts")

    def kill_server(self) -> None:
        """And start it again."""
        self._server.kill()
        self._server.wait()
        self._start_server()

    def submit(self, *specs: dict[str, Any]) -> list[str]:
        """Submit jobs that run in the workload folder; returns their ids."""
        import yaml

        file = self.folder / "jobs.yaml"
        base = {"command": ["python", "count.py", "20", "0.1"], "accelerator": "v5e-4",
                "workdir": str(WORKLOAD)}  # fmt: skip
        file.write_text(yaml.safe_dump_all([{**base, **spec} for spec in specs]))
        return [row["id"] for row in self.tpu.json("submit", str(file))["jobs"]]

    def states(self) -> dict[str, str]:
        found = self.tpu.json("jobs", "--all-users", "--limit", "1000")["jobs"]
        return {row["id"]: row["state"] for row in found}

    def steps(self, job: str) -> int:
        progress = self.tpu.json("show", job)["row"]["progress"]
        return (progress or {}).get("step") or 0

    def until(self, condition: Callable[[], bool], what: str, within: float = 120.0) -> None:
        patience = Patience(within)
        while not condition():
            if self._server.poll() is not None or patience.is_over:
                tail = (self.folder / "server.log").read_text()[-4000:]
                raise AssertionError(f"{what}: not within {within} s\n{tail}")
            time.sleep(0.25)

    def nodes(self) -> list[str]:
        with self.emulator.cloud.lock:
            self.emulator.cloud.run_due()
            return sorted(node.id for node in self.emulator.cloud.nodes.values())

    def close(self) -> None:
        self._server.terminate()
        try:
            self._server.wait(900)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(self._server.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
                    child.kill()
            self._server.kill()
            self._server.wait()
        self._log.close()
        self.emulator.close()
        assert processes.leftovers(self.folder / "machines") == []

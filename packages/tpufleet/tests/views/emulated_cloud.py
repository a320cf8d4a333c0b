"""An emulated cloud, and the command line of a user of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from google.cloud import tpu_v2

from tests.views.cli_runner import Tpu
from tpufleet.providers.tpu_vm import api
from tpufleet_testbed.cloud_tpu.emulator import Emulator
from tpufleet_testbed.cloud_tpu.locations import IMMEDIATE
from tpufleet_testbed.cloud_tpu.nodes import State

ZONES = "us-central1-a,europe-west4-a"


class Cloud:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.emulator = Emulator(**{"latencies": IMMEDIATE, **settings})
        self.emulator.start()
        self.tpu = Tpu(
            HOME=str(folder),
            TPUFLEET_HOME=str(folder / "state"),
        )  # fmt: skip
        self.configure()

    def configure(self, **settings: Any) -> None:
        """Settings of the section `tpu_vm` besides those that it needs."""
        section = {
            "project": "my-project", "zones": ZONES.split(","),
            "endpoint": self.emulator.endpoint, **settings,
        }  # fmt: skip
        self.tpu.environ["TPUFLEET_TPU_VM"] = json.dumps(section)

    def create(
        self, name: str, labels: dict[str, str], server: str = "", zone: str = "us-central1-a"
    ) -> None:
        """A v5e-4 by hand or, as its labels and metadata say, of a server at this address."""
        node = tpu_v2.Node(
            accelerator_type="v5litepod-4", runtime_version="v2-alpha-tpuv5-lite", labels=labels,
            metadata={"tpufleet-server": f"https://{server}:8470"} if server else {},
            scheduling_config=tpu_v2.SchedulingConfig(spot=True),
        )  # fmt: skip
        path = f"projects/my-project/locations/{zone}"
        api.connect(self.emulator.endpoint).create_node(
            {"parent": path, "node_id": name, "node": node}
        )

    def states(self) -> dict[str, str]:
        with self.emulator.cloud.lock:
            self.emulator.cloud.run_due()
            return {node.id: node.state.name for node in self.emulator.cloud.nodes.values()}

    def preempt(self, name: str, state: str = "PREEMPTED") -> None:
        with self.emulator.cloud.lock:
            [node] = [node for node in self.emulator.cloud.nodes.values() if node.id == name]
            self.emulator.cloud.reclaim(node, self.emulator.cloud.clock.now(), State[state])

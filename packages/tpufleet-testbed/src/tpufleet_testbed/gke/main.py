"""`python -m tpufleet_testbed.gke.main`: the emulated GKE API of a local cluster, as a process."""

from __future__ import annotations

import argparse
import logging
import signal
import threading
from pathlib import Path

from tpufleet.clocks import SystemClock
from tpufleet.errors import BadInput
from tpufleet.kubernetes.connections import Connection
from tpufleet.kubernetes.probes import ProbeServer
from tpufleet_testbed.gke import fault_plan
from tpufleet_testbed.gke.fault_plan import GkeFaultPlan
from tpufleet_testbed.gke.grpc_server import GkeServer
from tpufleet_testbed.gke.kwok_backend import KwokNodes
from tpufleet_testbed.gke.node_pools import GkeEmulator

log = logging.getLogger(__name__)

RELOAD_SECONDS = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--probes", required=True, metavar="HOST:PORT")
    parser.add_argument("--cluster", default="", metavar="NAME")
    parser.add_argument("--plan", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    gke = GkeEmulator(
        clock=SystemClock(),
        nodes=KwokNodes(Connection(options.kubeconfig, manager="gke")),
        cluster=options.cluster,
    )
    plan = PlanFile(options.plan, gke)
    plan.reload()
    server = GkeServer(gke, options.listen).start()
    probes = ProbeServer(options.probes, {"/readyz": lambda: (200, "ok\n")}).start()
    while not stopping.wait(RELOAD_SECONDS):
        plan.reload()
    probes.close()
    server.close()


class PlanFile:
    """A fault plan that users edit while the emulator runs."""

    def __init__(self, path: Path | None, gke: GkeEmulator) -> None:
        self._path, self._gke = path, gke
        self._text: str | None = None
        fault_plan.apply(GkeFaultPlan(), gke)

    def reload(self) -> bool:
        """Whether it changed. An invalid plan is logged, and the last valid one kept."""
        if self._path is None:
            return False
        try:
            text = self._path.read_text()
            if text == self._text:
                return False
            self._text = text
            fault_plan.apply(fault_plan.parse(text), self._gke)
        except (OSError, UnicodeDecodeError, BadInput) as error:
            log.error("%s: %s; the last valid plan stays in effect", self._path, error)
            return False
        return True


if __name__ == "__main__":
    main()

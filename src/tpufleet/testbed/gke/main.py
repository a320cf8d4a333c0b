"""`python -m tpufleet.testbed.gke.main`: the emulated GKE API of a local cluster, as a process."""

from __future__ import annotations

import argparse
import logging
import signal
import threading
from datetime import timedelta
from pathlib import Path

from tpufleet.clocks import SystemClock
from tpufleet.kubernetes.connections import Connection
from tpufleet.kubernetes.probes import ProbeServer
from tpufleet.testbed.gke.grpc_server import GkeServer
from tpufleet.testbed.gke.kwok_backend import KwokNodes
from tpufleet.testbed.gke.node_pools import GkeEmulator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--probes", required=True, metavar="HOST:PORT")
    parser.add_argument("--seconds", type=float, default=5.0, help="to create a node pool")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    gke = GkeEmulator(
        clock=SystemClock(),
        nodes=KwokNodes(Connection(options.kubeconfig, manager="gke")),
        creation_time=timedelta(seconds=options.seconds),
        deletion_time=timedelta(seconds=options.seconds),
    )
    server = GkeServer(gke, options.listen).start()
    probes = ProbeServer(options.probes, {"/readyz": lambda: (200, "ok\n")}).start()
    stopping.wait()
    probes.close()
    server.close()


if __name__ == "__main__":
    main()

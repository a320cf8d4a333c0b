"""Executes the agent of one emulated host, in place of the startup script of a TPU VM:
`python -m tpufleet_testbed.cloud_tpu.host_agent METADATA_URL MARKER`.

The local provider starts it; the agent reads its identity from the metadata server.
"""

from __future__ import annotations

import os
import sys

KEPT_VARIABLES = (
    "TPUFLEET_WORK", "TPUFLEET_ADDRESS", "TPUFLEET_COORDINATOR_PORT", "TPUFLEET_PLATFORM",
    "TPUFLEET_WAITS_SECONDS",
)  # fmt: skip


def main() -> None:
    machine, host = os.environ["TPUFLEET_SLICE"], os.environ["TPUFLEET_HOST_INDEX"]
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TPUFLEET_") or name in KEPT_VARIABLES
    }
    environ["TPUFLEET_METADATA"] = f"{sys.argv[1]}/{machine}/{host}"
    # The agent makes its memory, and so its environment, unreadable; the marker on the command line
    # still identifies its process.
    marker = f"{sys.argv[2]}={os.environ[sys.argv[2]]}"
    os.execve(sys.executable, [sys.executable, "-X", marker, "-m", "tpufleet", "agent"], environ)


if __name__ == "__main__":
    main()

"""Becomes the agent of one emulated host: `python -m tpufleet.testbed.cloud_tpu.host_agent METADATA_URL MARKER`.

The local provider starts it. What a startup script does on a real machine is little here: the
agent asks the metadata server who it is.
"""

from __future__ import annotations

import os
import sys

KEPT = (
    "TPUFLEET_WORK", "TPUFLEET_ADDRESS", "TPUFLEET_COORDINATOR_PORT", "TPUFLEET_PLATFORM",
    "TPUFLEET_WAITS_SECONDS",
)  # fmt: skip


def main() -> None:
    machine, host = os.environ["TPUFLEET_SLICE"], os.environ["TPUFLEET_HOST_INDEX"]
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TPUFLEET_") or name in KEPT
    }
    environ["TPUFLEET_METADATA"] = f"{sys.argv[1]}/{machine}/{host}"
    # The agent closes its memory, and with it its environment; its machine must still find it.
    mark = f"{sys.argv[2]}={os.environ[sys.argv[2]]}"
    os.execve(sys.executable, [sys.executable, "-X", mark, "-m", "tpufleet", "agent"], environ)


if __name__ == "__main__":
    main()

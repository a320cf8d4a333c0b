"""Entrypoints of a GKE pod that runs an agent.

`python -m tpufleet.agent.pod_entrypoint wait` runs in the init container, the only one that mounts
the Secret with the tokens of the whole gang. It waits until the pod's slice is assigned and copies
that one entry to a file.

`python -m tpufleet.agent.pod_entrypoint` runs in the main container. The workload runs as the same
user, so the agent deletes the file and protects its memory before any workload starts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tpufleet.clocks import wait_until

WAIT_SECONDS = 600.0
POLL_SECONDS = 1.0
EXIT_NOT_ASSIGNED = 0
EXIT_TERMINATED = 128 + signal.SIGTERM


def wait_for_assignment(environ: Mapping[str, str], timeout: float = WAIT_SECONDS) -> int:
    """Copy this pod's entry of the Secret to a private file, once there is one. A pod that no slice
    was assigned to within the timeout gets no file; that is not an error."""
    entry = Path(environ["TPUFLEET_SEATS"], environ["TPUFLEET_SEAT"])
    if not wait_until(entry.is_file, timeout, min(POLL_SECONDS, timeout / 10)):
        return EXIT_NOT_ASSIGNED
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with os.fdopen(os.open(environ["TPUFLEET_SEAT_FILE"], flags, 0o600), "w") as out:
        out.write(entry.read_text())
    return 0


def run_agent(
    environ: Mapping[str, str], run: Callable[[Mapping[str, str]], int] | None = None
) -> int:
    """Run the agent of the slice that the init container found. Returns its exit status."""
    # Not needed by the init container, which stays small without them.
    from tpufleet.agent import bootstrap_token, main, threads

    bootstrap_token.protect_memory()
    file = Path(environ.get("TPUFLEET_SEAT_FILE", ""))
    try:
        content = file.read_text()
        file.unlink()
    except FileNotFoundError:
        threads.log("no slice was assigned to this pod; exiting")
        return EXIT_NOT_ASSIGNED
    try:
        entry = json.loads(content)
        slice_id, token = str(entry["slice"]), str(entry["token"])
    except (ValueError, KeyError, TypeError) as error:
        threads.log(f"{file} does not name a slice and its token: {error}")
        return main.EXIT_BAD_SETTINGS
    assignment = {"TPUFLEET_SLICE": slice_id, "TPUFLEET_TOKEN": token}
    # A pod receives SIGTERM when its node is preempted or drained, or when the pod is evicted.
    return (run or main.run)({**environ, **assignment, "TPUFLEET_SIGTERM_MEANS": "preempted"})


if __name__ == "__main__":
    # Process 1 of a container ignores signals that it has no handler for.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    if sys.argv[1:] == ["wait"]:
        sys.exit(wait_for_assignment(os.environ))
    sys.exit(run_agent(os.environ))

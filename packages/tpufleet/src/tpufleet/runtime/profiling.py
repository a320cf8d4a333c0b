"""Profiles on request: `tpu profile` asks, and this process records a `jax.profiler` trace.

The agent writes the request to the run folder; a thread of this process sees it, records, and
writes an archive of the trace beside it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

from tpufleet.errors import unwritable
from tpufleet.runtime.context import context

REQUEST_FILE = "profile-request.json"
POLL_SECONDS = 0.25

_listener: threading.Thread | None = None


def reply_file(request_id: str) -> str:
    """Written when the profile is complete, or has failed: {"error": …}."""
    return f"profile-{request_id}.json"


def archive_file(request_id: str) -> str:
    return f"profile-{request_id}.tar.gz"


def accepted_file(request_id: str) -> str:
    """Written when the request has been seen."""
    return f"profile-{request_id}.accepted"


def start_profile_listener() -> bool:
    """Answer requests for profiles from now on. `initialize` does this. False outside tpufleet."""
    global _listener
    run_dir = context().run_dir
    if run_dir is None or context().local_process_id:
        return False
    if _listener is None:
        _listener = threading.Thread(
            target=_listen, args=[run_dir], name="tpufleet profiles", daemon=True
        )
        _listener.start()
    return True


def _listen(run_dir: Path) -> None:
    answered: str | None = None
    while True:
        time.sleep(POLL_SECONDS)
        request = _read_request(run_dir)
        if request is not None and request["id"] != answered:
            answered = str(request["id"])
            _answer(run_dir, answered, float(request["seconds"]))


def _read_request(run_dir: Path) -> dict[str, Any] | None:
    try:
        return json.loads((run_dir / REQUEST_FILE).read_text())
    except (OSError, ValueError):  # none, or not written completely yet
        return None


def _answer(run_dir: Path, request_id: str, seconds: float) -> None:
    error = ""
    try:
        (run_dir / accepted_file(request_id)).touch()
        _record(run_dir, request_id, seconds)
    except Exception as problem:  # whatever JAX raises, the program continues
        error = f"{type(problem).__name__}: {problem}"
    try:
        draft = run_dir / f".{reply_file(request_id)}"
        draft.write_text(json.dumps({"error": error}))
        draft.replace(run_dir / reply_file(request_id))
    except OSError as problem:  # a full disk must not end the program
        print(f"tpufleet: {unwritable('a profile', problem)}", file=sys.stderr)


def _record(run_dir: Path, request_id: str, seconds: float) -> None:
    if "jax" not in sys.modules:
        raise RuntimeError("the program has not imported jax")
    import jax

    folder = run_dir / f"profile-{request_id}"
    jax.profiler.start_trace(folder)
    try:
        time.sleep(seconds)
    finally:
        jax.profiler.stop_trace()
    draft = run_dir / f".{archive_file(request_id)}"
    with tarfile.open(draft, "w:gz", compresslevel=3) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.add(path, arcname=str(path.relative_to(folder)))
    os.replace(draft, run_dir / archive_file(request_id))
    shutil.rmtree(folder, ignore_errors=True)

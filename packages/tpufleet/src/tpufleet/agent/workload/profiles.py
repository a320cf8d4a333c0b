"""Asks the program of an attempt for a profile, through its run folder, and reads the archive."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

from tpufleet.agent.workload import untrusted_files
from tpufleet.clocks import wait_until
from tpufleet.errors import FleetError
from tpufleet.model.fleet.host_commands import MAX_FILE_BYTES
from tpufleet.runtime import profiling

POLL_SECONDS = 0.1
# A program may hold Python's lock for a while, in a compilation for example.
ACCEPT_SECONDS = 20.0
# To write and pack the trace, after it has been recorded.
PACK_SECONDS = 120.0
MAX_REPLY_BYTES = 64 * 1024


class ProfileFailed(FleetError):
    """There is no profile. The message says why, for the user."""


def capture(
    attempt_folder: Path | None,
    request_id: str,
    duration: timedelta,
    *,
    accept_seconds: float = ACCEPT_SECONDS,
) -> bytes:
    """The archive of a trace of the running program."""
    if attempt_folder is None:
        raise ProfileFailed("no program is running on this host yet; try again when it is")
    _write_request(attempt_folder, request_id, duration)
    accepted = f"run/{profiling.accepted_file(request_id)}"
    answered = lambda: _read(attempt_folder, accepted) is not None
    if not wait_until(answered, accept_seconds, POLL_SECONDS):
        raise ProfileFailed(
            f"the program did not answer within {accept_seconds:g} s; it must call "
            "`tpufleet.runtime.initialize()`, or run as `python -m tpufleet.runtime.profiled …`"
        )
    reply = f"run/{profiling.reply_file(request_id)}"
    seconds = duration.total_seconds() + PACK_SECONDS
    finished = lambda: _read(attempt_folder, reply) is not None
    if not wait_until(finished, seconds, POLL_SECONDS):
        raise ProfileFailed(f"the program did not finish the profile within {seconds:g} s")
    _raise_error(_read(attempt_folder, reply) or b"")
    archive = _read(attempt_folder, f"run/{profiling.archive_file(request_id)}", MAX_FILE_BYTES)
    if archive is None:
        limit = MAX_FILE_BYTES // 2**20
        raise ProfileFailed(f"the trace has more than {limit} MiB; record fewer seconds")
    return archive


def _write_request(attempt_folder: Path, request_id: str, duration: timedelta) -> None:
    """By rename, so that the program never reads half of it."""
    request = {"id": request_id, "seconds": duration.total_seconds()}
    draft, name = f".{profiling.REQUEST_FILE}.{request_id}", profiling.REQUEST_FILE
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        descriptor = untrusted_files.open_below(attempt_folder, f"run/{draft}", flags, 0o644)
        with open(descriptor, "w") as file:
            file.write(json.dumps(request))
        folder = os.open(attempt_folder / "run", untrusted_files.FOLDER_FLAGS)
        try:
            os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise ProfileFailed(f"cannot ask the program for a profile: {error.strerror}") from error


def _read(attempt_folder: Path, name: str, limit: int = MAX_REPLY_BYTES) -> bytes | None:
    try:
        return untrusted_files.read_below(attempt_folder, name, limit)[1]
    except OSError:  # not there yet, too large, or not a file
        return None


def _raise_error(reply: bytes) -> None:
    try:
        error = json.loads(reply)["error"]
    except (ValueError, KeyError, TypeError):
        error = "invalid reply"
    if error:
        raise ProfileFailed(f"the program could not record a profile: {str(error)[:500]}")

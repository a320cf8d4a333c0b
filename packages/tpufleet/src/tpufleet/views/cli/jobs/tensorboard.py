"""`tpu tensorboard`: the metrics, profiles and log folders of jobs in TensorBoard."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tpufleet import config
from tpufleet.errors import BadInput, FleetError, install_command, optional_packages
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.tensorboard_events import EventFile

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient

PROGRAM = (sys.executable, "-m", "tensorboard.main")
REFRESH_SECONDS = 10.0  # between two reads of the metrics of the jobs


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEvents:
    """The metrics of a job, in an event file of its own."""

    job_id: str
    file: EventFile


@click.command(
    epilog="\b\nExamples:\n  tpu tensorboard train\n  tpu tensorboard baseline sweep-1 sweep-2\n"
    "  tpu tensorboard --logdir profiles/train\n  tpu tensorboard train --write logs\n"
)
@click.argument("jobs", metavar="[JOB…]", nargs=-1)
@output.repeatable(
    "--logdir", metavar="DIR", help="Serve this folder too, or gs://bucket/folder. Repeatable."
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:6006",
    show_default=True,
    help="Address of TensorBoard.",
)
@click.option(
    "--write",
    "only_write",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the metrics as event files to this folder, and start nothing.",
)
def tensorboard(
    jobs: tuple[str, ...], logdir: tuple[str, ...], listen: str, only_write: Path | None
) -> int:
    """Serve JOBs in TensorBoard until interrupted.

    Of each job: the metrics that it reported (`tpu compare`), kept up to date; event files below
    its checkpoint location, if this machine can read it; and what `tpu profile` wrote to
    profiles/JOB.
    TensorBoard is in the extra tpufleet[tensorboard].
    """
    if not jobs and not logdir:
        raise BadInput("name a job, or a folder with --logdir")
    config.checked(config.parse_listen_address, listen, "--listen")
    with optional_packages("tpu tensorboard", "tensorboard"):
        importlib.import_module("tensorboard")
    with contextlib.ExitStack() as stack:
        root = only_write or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tpu-")))
        client = stack.enter_context(connection.connect()) if jobs else None
        runs: dict[str, str] = {}
        events = [_add_job(client, job, root, runs) for job in jobs if client is not None]
        for folder in logdir:
            runs[_run_name(folder.rstrip("/").rpartition("/")[2] or "logs", runs)] = folder
        _refresh(client, events)
        if only_write:
            count = text.counted(len(events), "job")
            output.print_status(f"wrote the metrics of {count} to {only_write}")
            return 0
        if not _reads_buckets() and any(folder.startswith("gs://") for folder in runs.values()):
            output.print_status(
                "TensorBoard reads gs:// folders only with the package gcsfs\n"
                f"  next: {install_command('tpufleet[tensorboard]')}"
            )
        host, _, port = listen.rpartition(":")
        command = [*PROGRAM, *location_options(runs), "--port", port, "--host", host]
        output.print_status(f"TensorBoard: http://{listen} (Ctrl-C stops it)")
        return _serve(command, client, events)


def _add_job(client: FleetClient, ref: str, root: Path, runs: dict[str, str]) -> JobEvents:
    job = client.job(ref).job
    name = _run_name(job.spec.name, runs)
    folder = root / name
    runs[name] = str(folder)
    file = EventFile(folder / "metrics", job.submitted_at)
    if job.checkpoint.startswith("gs://") or Path(job.checkpoint or "-").is_dir():
        runs[f"{name}-files"] = job.checkpoint
    profiles = Path("profiles", job.spec.name)
    if profiles.is_dir():
        runs[f"{name}-profiles"] = str(profiles.absolute())
    return JobEvents(job_id=job.id, file=file)


def _run_name(name: str, taken: dict[str, str]) -> str:
    """Commas and colons separate folders in --logdir_spec."""
    name = name.replace(",", "-").replace(":", "-")
    number = 2
    unique = name
    while unique in taken:
        unique, number = f"{name}-{number}", number + 1
    return unique


def location_options(runs: dict[str, str]) -> list[str]:
    if len(runs) == 1:
        return ["--logdir", next(iter(runs.values()))]
    return ["--logdir_spec", ",".join(f"{name}:{folder}" for name, folder in runs.items())]


def _refresh(client: FleetClient | None, events: list[JobEvents]) -> None:
    for each in events:
        assert client is not None
        each.file.append(client.metrics(each.job_id).points)


def _serve(command: list[str], client: FleetClient | None, events: list[JobEvents]) -> int:
    process = subprocess.Popen(command)
    try:
        while True:
            try:
                return process.wait(REFRESH_SECONDS)
            except subprocess.TimeoutExpired:
                pass  # it still runs
            try:
                _refresh(client, events)
            except FleetError as error:
                output.print_status(f"cannot read metrics; retrying: {error}")
    except KeyboardInterrupt:
        return 0
    finally:
        process.terminate()
        process.wait()


def _reads_buckets() -> bool:
    return any(importlib.util.find_spec(name) is not None for name in ("gcsfs", "tensorflow"))

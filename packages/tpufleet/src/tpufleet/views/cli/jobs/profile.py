"""`tpu profile`: record a trace of a running job, and bring it here."""

from __future__ import annotations

import io
import secrets
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import click

from tpufleet.errors import FleetError, no_such_host
from tpufleet.model.fleet.host_commands import (
    HEARTBEAT_ALLOWANCE,
    MAX_PROFILE,
    HostCommandKind,
    HostCommandRequest,
)
from tpufleet.model.tpu import type_lookup
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option
from tpufleet.views.cli.parameter_types import host_option
from tpufleet.views.cli.slices.host_commands import find_slices, no_answer, wait_for_results

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient
    from tpufleet.model.api_types import SliceRow

# To write, pack and upload a trace after it has been recorded.
PACKING_ALLOWANCE = timedelta(minutes=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledHost:
    """One host of the job, and the command that was sent to it."""

    rank: int  # over all slices of the job, as in `tpu logs --host`
    index: int  # in its slice
    slice_id: str
    request: HostCommandRequest


@click.command(
    epilog="\b\nExamples:\n  tpu profile train\n  tpu profile train --seconds 10 --host all\n"
    "  tpu profile train --output /tmp/traces\n"
)
@click.argument("job", metavar="JOB")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1, max=MAX_PROFILE.total_seconds()),
    default=3.0,
    show_default=True,
    help="How long to record.",
)
@host_option("Record this host, or all.", default=0)
@click.option(
    "--output",
    "-o",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the trace (default: profiles/JOB).",
)
@json_option
def profile(job: str, seconds: float, host: int | None, folder: Path | None) -> None:
    """Record a `jax.profiler` trace of a running JOB and write it to a folder that TensorBoard
    reads. The job continues meanwhile.

    The program must call `tpufleet.runtime.initialize()`, or be started as
    `python -m tpufleet.runtime.profiled PROGRAM.py`.
    """
    with connection.connect() as client:
        rows, name = find_slices(client, job), job
        if rows[0].id != job:
            name = client.job(job).job.spec.name
        hosts = list(_hosts(rows, host, timedelta(seconds=seconds)))
        target = folder or Path("profiles", name)
        for each in hosts:  # all of them first, so that they record at the same time
            client.send_host_command(each.slice_id, each.request)
        if not output.as_json():
            count = text.counted(len(hosts), "host")
            output.print_status(f"recording {seconds:g} s on {count} of {name}")
        run = datetime.now().strftime("%Y_%m_%d_%H_%M_%S")
        files = [path for each in hosts for path in _fetch(client, each, target, run)]
    if output.printed_json({"folder": str(target), "files": [str(path) for path in files]}):
        return
    size = sum(path.stat().st_size for path in files)
    click.echo(f"{target}: {text.counted(len(files), 'file')}, {text.size(size)}")
    output.print_status(
        f"  next: tpu tensorboard --logdir {target}\n"
        "  or open a trace.json.gz in https://ui.perfetto.dev"
    )


def _hosts(
    rows: tuple[SliceRow, ...], host: int | None, duration: timedelta
) -> Iterator[ProfiledHost]:
    places = [
        (row.id, index) for row in rows for index in range(type_lookup.find(row.accelerator).hosts)
    ]
    if host is not None and host >= len(places):
        raise no_such_host("the job", len(places), host)
    for rank, (slice_id, index) in enumerate(places):
        if host in (None, rank):
            request = HostCommandRequest(
                id=secrets.token_hex(8),
                kind=HostCommandKind.PROFILE,
                host=index,
                duration=duration,
                timeout=duration + PACKING_ALLOWANCE,
            )
            yield ProfiledHost(rank=rank, index=index, slice_id=slice_id, request=request)


def _fetch(client: FleetClient, host: ProfiledHost, target: Path, run: str) -> Iterator[Path]:
    within = host.request.timeout + HEARTBEAT_ALLOWANCE
    report = wait_for_results(client, host.slice_id, host.request, within)
    if not report.results:
        raise no_answer([f"host {host.rank}"], within, host.slice_id)
    (result,) = report.results
    if result.status != 0:
        raise FleetError(f"no profile of host {host.rank}: {text.one_line(result.message)}")
    data = client.host_command_file(host.slice_id, host.request.id, host.index)
    yield from unpack(data, target, run, f"host-{host.rank}")


def unpack(data: bytes, target: Path, run: str, host: str) -> Iterator[Path]:
    """Write the files of a trace where TensorBoard looks for them: `plugins/profile/RUN/HOST.KIND`.
    The names in the archive come from a job: only their last part, and only its kind, is used."""
    folder = target / "plugins" / "profile" / run
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for member in archive:
            kind = PurePosixPath(member.name).name.partition(".")[2]
            content = archive.extractfile(member) if member.isfile() else None
            if content is None or kind not in TRACE_KINDS:
                continue
            if member.size > MAX_UNPACKED:
                limit = MAX_UNPACKED // 2**20
                raise FleetError(f"the trace has more than {limit} MiB; record fewer seconds")
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{host}.{kind}"
            with path.open("wb") as file:
                shutil.copyfileobj(content, file)
            yield path


# Of one file: an archive of 64 MiB can stand for a thousand times as much.
MAX_UNPACKED = 2**30
TRACE_KINDS = ("xplane.pb", "trace.json.gz", "memory_profile.json.gz")

"""`tpu ssh`: a shell on a host of a slice."""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from tpufleet.errors import BadInput
from tpufleet.model.fleet import fleets
from tpufleet.model.fleet.host_commands import HEARTBEAT_ALLOWANCE, HostCommandRequest
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.views.cli import connection, gcloud, output
from tpufleet.views.cli.slices.host_commands import find_slice, no_answer, wait_for_results

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient

# A single host with one of them is in a group too.
GROUPED = (Capacity.QUEUED, Capacity.RESERVED)
ANSWERS_WITHIN = timedelta(seconds=10)


@click.command(
    epilog="\b\nExamples:\n  tpu ssh train\n  tpu ssh train-1 --host 3 -- htop\n",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("target", metavar="JOB|SLICE")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--host", default=0, type=click.IntRange(min=0), help="Host number.")
@click.option(
    "--tunnel-through-iap",
    is_flag=True,
    help="Connect through Identity-Aware Proxy (default if external_ips is false).",
)
@output.dry_run_option
def ssh(
    target: str, command: tuple[str, ...], host: int, tunnel_through_iap: bool, dry_run: bool
) -> None:
    """Open a shell on a host of a slice, or of that of a JOB, with ssh through gcloud; or run
    COMMAND there.

    tpufleet itself never needs ssh.
    """
    configured = connection.settings()
    with connection.connect() as client:
        row = find_slice(client, target)
        section = {"tpu-vm": configured.tpu_vm, "compute": configured.compute}.get(row.provider)
        settings = section or {}
        emulator = settings.get("endpoint") if not dry_run else None
        if row.provider not in ("tpu-vm", "compute") or emulator:
            raise BadInput(
                f"{row.id} is on {emulator or row.provider}, which has no ssh\n"
                f"  next: tpu exec {row.id} -- COMMAND"
            )
        grouped = row.provider == "compute" and (
            row.hosts > 1 or row.capacity in GROUPED or bool(row.node)
        )
        name = _instance(client, row.id, host) if grouped else row.node or row.id
    project = str(settings.get("project") or "")
    address = gcloud.NodeAddress(
        name=name,
        zone=row.zone,
        project=project,
        is_instance=row.provider == "compute",
    )
    argv = address.ssh(str(host), command)
    if tunnel_through_iap or settings.get("external_ips") is False:
        argv.append("--tunnel-through-iap")
    gcloud.replace_process(argv, dry_run)


def _instance(client: FleetClient, slice_id: SliceId, host: int) -> str:
    """The VMs of a group have names that do not tell the number of the host. It knows its own."""
    request = HostCommandRequest(
        id=secrets.token_hex(8), command=("hostname",), host=host, timeout=ANSWERS_WITHIN
    )
    report = wait_for_results(client, slice_id, request, ANSWERS_WITHIN + HEARTBEAT_ALLOWANCE)
    names = [result.output.strip().partition(".")[0] for result in report.results]
    if not names or not fleets.NODE_ID.fullmatch(names[0]):
        raise no_answer([f"host {host}"], ANSWERS_WITHIN, slice_id)
    return names[0]

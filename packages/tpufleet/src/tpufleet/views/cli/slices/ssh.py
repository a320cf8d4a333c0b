"""`tpu ssh`: a shell on a host of a slice."""

from __future__ import annotations

import click

from tpufleet.errors import BadInput
from tpufleet.model.tpu import type_lookup
from tpufleet.views.cli import connection, gcloud, output
from tpufleet.views.cli.slices.host_commands import find_slice


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
    with connection.connect() as client:
        row = find_slice(client, target)
    slice_id = row.id
    configured = connection.settings()
    section = {"tpu-vm": configured.tpu_vm, "compute": configured.compute}.get(row.provider)
    settings = section or {}
    emulator = settings.get("endpoint") if not dry_run else None
    # The VMs of a group have names that do not tell the number of the host.
    grouped = row.provider == "compute" and type_lookup.find(row.accelerator).hosts > 1
    if row.provider not in ("tpu-vm", "compute") or emulator or grouped:
        raise BadInput(
            f"{slice_id} is on {emulator or row.provider}, which has no ssh\n"
            f"  next: tpu exec {slice_id} -- COMMAND"
        )
    project = str(settings.get("project") or "")
    address = gcloud.NodeAddress(
        name=row.node or row.id,
        zone=row.zone,
        project=project,
        is_instance=row.provider == "compute",
    )
    argv = address.ssh(str(host), command)
    if tunnel_through_iap or settings.get("external_ips") is False:
        argv.append("--tunnel-through-iap")
    gcloud.replace_process(argv, dry_run)

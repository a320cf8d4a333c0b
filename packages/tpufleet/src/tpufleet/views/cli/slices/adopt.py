"""`tpu adopt` and `tpu adopt undo`: TPU VMs, instances and groups of instances that people made, as
slices of a pool."""

from __future__ import annotations

import shlex
import time
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import click

from tpufleet.errors import BadInput, FleetError, Unreachable
from tpufleet.model.api_types import SliceRow
from tpufleet.model.fleet import fleets
from tpufleet.model.fleet.slices import SliceId, SliceState
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet.views.cli import connection, gcloud, output
from tpufleet.views.cli.gcloud import NodeAddress
from tpufleet.views.cli.output import example, json_option
from tpufleet.views.cli.vm import remote_commands
from tpufleet.views.cli.vm.outcomes import NodeResult

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient

POLL_SECONDS = 0.5
PREPARED_WITHIN, READY_WITHIN, LISTED_WITHIN = 120.0, 900.0, 60.0  # seconds
PARALLEL_SSH = 16
SLICE_LABEL = "tpufleet-slice"  # of its instances
_LOST = (SliceState.RELEASING, SliceState.GONE)


@click.command(
    cls=output.CommandGroup,
    epilog="\b\nExamples:\n  tpu adopt v4-32-py2 --pool lab --zone us-central2-b\n"
    "  tpu adopt v4-32-py2 --pool lab --no-ssh\n",
)
@click.argument("node")
@click.option("--pool", required=True, help="Of the provider tpu-vm or compute, with the type.")
@click.option("--zone", help="Required unless the name contains it or the pool has one zone.")
@click.option("--no-ssh", is_flag=True, help="Only print what to run on the hosts.")
@json_option
def adopt(node: str, pool: str, zone: str | None, no_ssh: bool) -> None:
    """Make a TPU VM that was created by hand usable for the jobs of a pool.

    NODE may also be an instance with TPUs, or a managed instance group. Requires the admin role.
    The server labels NODE and puts its startup script into the metadata; this command runs it on
    every host, with ssh through gcloud. Nothing on it is ended, and it is never deleted: `tpu adopt
    undo` gives it back.
    """
    fleets.check_name(node)
    with connection.connect() as client:
        place = _zone(client, node, pool, zone)
        slice_id = client.adopt(node, place, pool)
        prepared = _wait(
            client, node, slice_id, PREPARED_WITHIN, set(SliceState) - {SliceState.REQUESTED}
        )
        if prepared.state is not SliceState.READY:
            if no_ssh:
                output.print_status(_by_hand(prepared))
            else:
                output.print_status(f"{node}: prepared; installing the agent with ssh")
                _install(prepared)
            prepared = _wait(client, node, slice_id, READY_WITHIN, {SliceState.READY})
    kind = short_name(prepared.accelerator)
    output.print_result(
        prepared,
        f"{node} is ready in pool {pool}, as slice {prepared.id}\n"
        f"  next: tpu run {kind} --pool {pool} -- python train.py",
    )


@adopt.command(epilog=example("tpu adopt undo v4-32-py2"))
@click.argument("node", metavar="NODE|SLICE")
@json_option
def undo(node: str) -> None:
    """Give an adopted TPU VM back: its agent stops and the server forgets it. It is not deleted.

    Requires the admin role. Refused while a job runs on it.
    """
    with connection.connect() as client:
        known = [row for row in client.slices() if node in (row.id, row.node) and row.node]
        client.unregister(node)
    message = f"gave {node} back; it goes on running"
    if known and known[0].provider == "tpu-vm":
        message += f"\n  next: `tpu vm delete {known[0].node} --zone {known[0].zone}` deletes it"
    output.print_result({"unregistered": node}, message)


def _zone(client: FleetClient, node: str, pool: str, zone: str | None) -> str:
    if zone is not None:
        return fleets.check_zone(zone)
    member = fleets.parse_member(node)
    if member is not None:
        return member.zone
    zones = client.pool(pool).zones
    if len(zones) == 1:
        return zones[0]
    raise BadInput(f"--zone is required: neither {node} nor pool {pool} names one zone")


def _wait(
    client: FleetClient,
    node: str,
    slice_id: SliceId,
    seconds: float,
    states: Set[SliceState],
) -> SliceRow:
    """The slice of the node, once it is in one of these states."""
    deadline, shown = time.monotonic() + seconds, ""
    while True:
        row = client.find_slice(slice_id)
        if row is not None and row.state in _LOST:
            raise FleetError(
                f"{node} was not adopted: {row.reason}\n  next: tpu events slice:{row.id}"
            )
        if row is not None and row.state in states:
            return row
        if row is not None and row.reason != shown:
            shown = row.reason
            output.print_status(f"{node}: {shown}")
        if time.monotonic() > deadline:
            raise Unreachable(
                f"{node} is not ready after {seconds:g} s: {shown or 'the server has not begun'}\n"
                f"  next: `tpu inventory` shows it; `tpu adopt undo {node}` gives it back"
            )
        time.sleep(POLL_SECONDS)


def _install(row: SliceRow) -> None:
    configured = connection.settings()
    is_instance = row.provider == "compute"
    settings = (configured.compute if is_instance else configured.tpu_vm) or {}
    if settings.get("endpoint"):
        from tpufleet.compose import providers

        if is_instance:
            providers.reset_emulated_instances(configured, row.zone, row.id)
        else:
            providers.run_emulated_startup_script(str(settings["endpoint"]), row.node)
        return
    project = str(settings.get("project") or "")
    names = _instances(row, project) if is_instance else [row.node]
    hosts = [
        NodeAddress(name=name, zone=row.zone, project=project, is_instance=is_instance)
        for name in names
    ]
    with ThreadPoolExecutor(PARALLEL_SSH) as pool:
        for outcome in pool.map(
            lambda host: remote_commands.run_startup_script(host, row.id), hosts
        ):
            if outcome.result is not NodeResult.DONE:
                raise FleetError(f"{outcome.name}: {outcome.message}\n{_by_hand(row)}")


def _instances(row: SliceRow, project: str) -> list[str]:
    """The server has labelled them."""
    argv = _list_instances(row) + ([f"--project={project}"] if project else [])
    found = gcloud.run(argv, LISTED_WITHIN)
    names = [line for line in found.output.splitlines() if fleets.NODE_ID.fullmatch(line)]
    if found.status or not names:
        raise FleetError(f"{row.node}: {found.output.strip() or 'no output'}\n{_by_hand(row)}")
    return names


def _list_instances(row: SliceRow) -> list[str]:
    return [
        "gcloud", "compute", "instances", "list", f"--zones={row.zone}",
        f"--filter=labels.{SLICE_LABEL}={row.id}", "--format=value(name)",
    ]  # fmt: skip


def _by_hand(row: SliceRow) -> str:
    is_instance = row.provider == "compute"
    name = "VM" if is_instance else row.node
    address = NodeAddress(name=name, zone=row.zone, is_instance=is_instance)
    line = shlex.join(address.ssh("all", remote_commands.STARTUP_COMMAND))
    if is_instance:
        line = f"{shlex.join(_list_instances(row))} | xargs -I VM {line}"
    return f"  next: run the startup script on every host, or restart the node:\n{line}"

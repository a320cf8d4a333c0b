"""`tpu deploy server`: run the server on a VM in the cloud project."""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tpufleet.errors import BadInput, FleetError, invalid, must_be, together
from tpufleet.model.fleet import fleets
from tpufleet.model.fleet.paid_resources import Belongs
from tpufleet.model.tpu import server_vm_prices
from tpufleet.views import text
from tpufleet.views.cli import config_file, connection, output
from tpufleet.views.cli.output import json_option

if TYPE_CHECKING:
    from tpufleet.compose.server_deployment import Plan
    from tpufleet.config import Config
    from tpufleet.model.fleet.paid_resources import PaidResource

CONNECT_SECONDS = 60.0


@click.command(
    epilog="\b\nExamples:\n  tpu deploy server --dry-run\n"
    "  tpu deploy server --allow 198.51.100.0/24\n  tpu deploy server --delete\n"
)
@click.option("--zone", help="Zone of the VM (default: where it is, or the first of tpu_vm).")
@click.option("--name", default="tpufleet-server", show_default=True, help="Of all resources.")
@click.option("--machine-type", show_default="the cheapest with 2 GB")
@click.option(
    "--disk-gb", type=click.IntRange(10, 65536), help="Size of the state disk (default: 10)."
)  # fmt: skip
@click.option(
    "--allow", multiple=True, metavar="CIDR",
    help="Addresses that clients connect from; repeatable (default: as it is, or 0.0.0.0/0). TPU "
    "hosts connect over the VPC.",
)  # fmt: skip
@click.option("--port", type=click.IntRange(1, 65535), show_default="8470")
@click.option(
    "--service-account", default="default", show_default=True, metavar="EMAIL",
    help="Of the VM; it needs the roles of a server.",
)  # fmt: skip
@click.option("--bundle", metavar="URL", help="What the VM installs (default: built and uploaded).")
@click.option("--bundle-sha256", metavar="HEX", help="Its checksum.")
@output.python_folder_option
@output.dry_run_option
@click.option("--delete", is_flag=True, help="Delete the VM, its address and its firewall rule.")
@click.option("--state", is_flag=True, help="With --delete: the state disk too.")
@output.yes_option
@json_option
def server(
    zone: str | None,
    name: str,
    machine_type: str | None,
    disk_gb: int | None,
    allow: tuple[str, ...],
    port: int | None,
    service_account: str,
    bundle: str | None,
    bundle_sha256: str | None,
    python_folder: Path | None,
    dry_run: bool,
    delete: bool,
    state: bool,
    yes: bool,
) -> None:
    """Run the server on a VM in the cloud project, for machines that TPU hosts cannot reach.

    A laptop behind NAT is such a machine. The VM has a static address, HTTPS with a private CA that
    it makes itself, and a state disk that survives it. TPU hosts reach it over the VPC. Neither
    gcloud nor SSH is needed. Repeated, the command updates the server: configuration, bundle,
    --allow and --machine-type. Addresses and running jobs stay.
    """
    from tpufleet.compose import server_deployment as deployment

    config = connection.settings(new_file=True)
    if (bundle is None) != (bundle_sha256 is None):
        raise BadInput(together("--bundle", "--bundle-sha256"))
    vm = deployment.server_vm(
        config,
        zone=fleets.check_zone(zone) if zone else None,
        report=output.print_status,
        name=_checked_name(name),
        machine_type=machine_type,
        disk_gb=disk_gb,
        port=port,
        service_account=service_account,
        allowed=_checked_ranges(allow),
    )
    grants = vm.connect()
    if delete and not dry_run:
        live = deployment.live_slices(config, vm, output.print_status, with_state=state)
        if live:
            verb = "may manage" if live[0].belongs is Belongs.ORPHANED else "manages"
            raise FleetError(
                f"{name} {verb} {_paid(live)}, which nothing would delete without it\n"
                + "\n".join(f"  {each.type} {each.name} in {each.location}" for each in live)
                + "".join(f"\n  next: {command}" for command in sorted({e.next for e in live}))
            )
        output.confirm_deletion(f"the server {name}", yes)
        kept = vm.delete(with_state=state)
        address_file = config.home / "deployed" / name / "server"
        if address_file.exists():
            config_file.remove(config.config_file, _user_settings(address_file.parent))
        stays = f"; disk {kept[0]} stays, with the state" if kept else ""
        output.print_deleted({"deleted": name, "kept": kept}, f"{name}{stays}")
        return
    plan = vm.plan()
    if dry_run or not output.as_json():
        _show_plan(plan)
    if deployment.shares_account(config, service_account):
        shared = (
            "every job can act as the server, because hosts have its service account\n  next: set "
            "service_account in tpu_vm to one that may only use the bucket: docs/tpu-vms.md"
        )
        output.print_warnings([shared])
    if dry_run:
        return
    if grants:
        commands = "".join(f"\n  next: {grant}" for grant in grants)
        output.print_warnings([f"the service account of the VM lacks roles of a server{commands}"])
    output.confirm(
        "Update it? The VM restarts; jobs continue." if plan.updates else "Create it?", yes
    )
    folder = config.home / "deployed" / name
    token = _token(folder, deployment.new_token)
    source = (bundle, bundle_sha256) if bundle and bundle_sha256 else None
    installed = source or deployment.build_bundle(config, output.print_status, python_folder)
    address = vm.apply(deployment.metadata(config, installed, token))
    ca = vm.wait_until_ready()
    (folder / "ca.pem").write_text(ca)
    url = f"https://{address}:{plan.settings.port}"
    (folder / "server").write_text(f"{url}\n")
    problem = _connection_problem(url, token, folder / "ca.pem")
    saved = _save_settings(config, folder)
    if orphans := deployment.orphans(config, output.print_status):
        left = f"an earlier server left {_paid(orphans)}\n  next: tpu cost project"
        output.print_warnings([left])
    _show_result(url, token, folder, saved, problem)


def _show_plan(plan: Plan) -> None:
    project, zone, price = plan.settings.project, plan.settings.zone, plan.usd_per_hour
    if output.as_json():
        resources = [{"name": name, "description": what} for name, what in plan.resources]
        output.print_json(
            {"project": project, "zone": zone, "resources": resources, "usd_per_hour": price}
        )
        return
    click.echo(f"In project {project}, {zone}:")
    for name, what in plan.resources:
        click.echo(f"  {name:<24} {what}")
    cost = (
        "unknown for this machine type"
        if price is None
        else f"about ${price:.3f} per hour, "
        f"${price * server_vm_prices.HOURS_PER_MONTH:.0f} per month "
        f"(estimate for us-central1; today's prices: {server_vm_prices.SOURCE})"
    )
    click.echo(f"Price: {cost}")


def _paid(slices: Sequence[PaidResource]) -> str:
    usd = sum(each.usd_per_hour or 0.0 for each in slices)
    return f"{text.counted(len(slices), 'slice')} (about ${usd:.2f} per hour)"


def _user_settings(folder: Path) -> dict[str, str]:
    """What a client of the deployed server needs in its config file."""
    return {
        "server": (folder / "server").read_text().strip(),
        "ca_file": str(folder / "ca.pem"),
        "token_file": str(folder / "token"),
    }


def _save_settings(config: Config, folder: Path) -> Path | None:
    """The config file that has the settings now. None: it names another server or CA."""
    values = _user_settings(folder)
    known = {"server": config.server, "ca_file": config.ca_file, "token_file": config.token_file}
    if any(value is not None and str(value) != values[key] for key, value in known.items()):
        return None
    return config.config_file if config_file.save(config.config_file, values) else None


def _show_result(url: str, token: str, folder: Path, saved: Path | None, problem: str) -> None:
    values = _user_settings(folder)
    if output.as_json():
        written = {"config_file": str(saved) if saved else None}
        output.print_json({**values, "token": token, "problem": problem, **written})
        return
    if problem:
        output.print_warnings(
            [
                f"the server runs, but this machine cannot use it: {problem}\n"
                "  next: pass --allow with the address of this machine, or use a machine in the VPC"
            ]
        )
    click.echo(
        f"server ready: {url}\nadmin token (shown once, saved in {values['token_file']}): {token}"
    )
    if saved is not None:
        click.echo(
            f"wrote server, ca_file and token_file to {saved}\n"
            "  next: `tpu status`; for other people `tpu user add NAME`"
        )
        return
    lines = "".join(f"\n  {key}: {value}" for key, value in values.items())
    click.echo(f"next: set these in your config file{lines}")


def _connection_problem(url: str, token: str, ca_file: Path) -> str:
    from tpufleet.client.fleet import FleetClient

    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            with FleetClient(url, token, ca_file=ca_file) as client:
                client.me()
            return ""
        except FleetError as error:
            if time.monotonic() > deadline:
                return str(error)
            time.sleep(2.0)


def _token(folder: Path, new_token: Any) -> str:
    """The token of an earlier run, whose hash the VM has; else a new one."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / "token"
    if not file.exists():
        file.touch(mode=0o600)
        file.write_text(new_token() + "\n")
    return file.read_text().strip()


def _checked_name(name: str) -> str:
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", name):
        raise must_be("a name of a-z, 0-9 and -", name, "--name")
    return name


def _checked_ranges(ranges: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(str(ipaddress.ip_network(each)) for each in ranges)
    except ValueError as error:
        shown = ", ".join(ranges)
        raise invalid(shown, "an address range", "198.51.100.0/24", "--allow") from error

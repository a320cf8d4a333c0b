"""`tpu init`: from nothing to a first job on a cloud project."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from tpufleet import config
from tpufleet.errors import BadInput, exists, no_project, together
from tpufleet.model.fleet import fleets
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import prices, tpu_zones, type_lookup
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.operators.check import check, print_checks, type_and_capacity

DEFAULT_TYPE = "v5e-4"
MAX_ZONES = 3
PROXIED = "127.0.0.1:8470"  # where a proxy with TLS finds the server


@click.command(
    cls=output.CommandGroup,
    epilog="\b\nExamples:\n"
    "  tpu init --project my-project --type v5e-16 --zone us-west4-a\n"
    "  tpu init --type v4-8:on-demand --type v5e-4 --type v6e-4 --zone us-central2-b "
    "--zone us-central1-a --zone europe-west4-a\n  tpu init check\n",
)
@click.option("--project", help="Project id (default: of gcloud, or asked for).")
@click.option(
    "--type", "types", multiple=True, metavar="TYPE[:CAPACITY]",
    help="A TPU type that you want to use, such as v4-8:on-demand (default capacity: spot).",
)  # fmt: skip
@click.option("--zone", "zones", multiple=True, help="Zone (default: those that offer the types).")
@click.option("--bucket", metavar="gs://…", help="For checkpoints, code and logs.")
@click.option(
    "--public-url",
    metavar="URL",
    help="At which TPU hosts reach a server on this machine (default: `tpu deploy server` later).",
)
@click.option("--tls-cert", metavar="FILE", help="Certificate chain of that server (PEM).")
@click.option("--tls-key", metavar="FILE", help="Its private key (PEM).")
@click.option("--insecure-http", is_flag=True, help="Allow a --public-url with plain HTTP.")
@click.option("--internal-ips", is_flag=True, help="Hosts get no external addresses.")
@click.option("--yes", is_flag=True, help="Ask nothing; replace an existing config file.")
def init(
    project: str | None,
    types: tuple[str, ...],
    zones: tuple[str, ...],
    bucket: str | None,
    public_url: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    insecure_http: bool,
    internal_ips: bool,
    yes: bool,
) -> None:
    """Write a config file for a Google Cloud project, check the project, and print the next steps.

    Nothing in the project is changed.
    """
    ask = output.is_terminal() and not yes
    project = project or _gcloud_project()
    if project is None and ask:
        project = click.prompt("Project id")
    if not project:
        raise no_project()
    config.checked(fleets.check_project, project, "--project")
    bucket = bucket or f"gs://{project}-tpufleet/fleet"
    config.checked(config.parse_bucket, bucket, "--bucket")
    if not types:
        typed = click.prompt("TPU types", default=DEFAULT_TYPE) if ask else DEFAULT_TYPE
        types = tuple(typed.replace(",", " ").split())
    wanted = list(map(type_and_capacity, types))
    document: dict[str, Any] = {
        **_server(public_url, tls_cert, tls_key, insecure_http),
        "bucket": bucket,
        **_sections(project, list(dict(wanted)), zones, ask, internal_ips),
    }
    # Not loaded: the command may replace a file with errors.
    file = config.config_file(os.environ, Path.home())
    _write(file, document, ask=ask, yes=yes)
    _check(wanted)
    click.echo("\nNext, once the checks pass:")
    table = prices.price_table(connection.settings().prices)
    for step in _next_steps(public_url, wanted, table):
        click.echo(f"  {step}")


def _next_steps(
    public_url: str | None,
    wanted: Sequence[tuple[str, Capacity]],
    table: Mapping[tuple[str, str], prices.Price],
) -> list[str]:
    server = ["tpu deploy bundle", "tpu serve"] if public_url else ["tpu deploy server"]
    program = "python -c 'import jax; print(jax.devices())'"
    jobs = []
    for name, kind in dict.fromkeys(wanted):
        chip_hour = prices.chip_hour_price(name, kind, table)
        limit = "--set max_hours=1"  # one on the cost has no effect without a price
        if chip_hour is not None:  # enough for 20 minutes
            hourly = chip_hour * type_lookup.find(name).chips
            limit = f"--max-cost {max(5, math.ceil(hourly / 3))}"
        jobs.append(f"tpu run {name} --{kind} {limit} -- {program}")
    return [*server, *jobs]


def _server(
    public_url: str | None, cert: str | None, key: str | None, insecure_http: bool
) -> dict[str, Any]:
    """Settings of a server on this machine; none without `public_url`."""
    if public_url is None:
        if cert or key or insecure_http:
            raise BadInput("--tls-cert, --tls-key and --insecure-http require --public-url")
        return {}
    parts = urlsplit(config.checked(config.parse_server_url, public_url, "--public-url"))
    if (cert is None) != (key is None):
        raise BadInput(together("--tls-cert", "--tls-key"))
    document: dict[str, Any] = {"public_url": public_url}
    if cert is not None and key is not None:
        files = {"tls_cert": str(Path(cert).absolute()), "tls_key": str(Path(key).absolute())}
        return {**document, "listen": f"0.0.0.0:{parts.port or 443}", **files}
    if parts.scheme == "https":
        return {**document, "listen": PROXIED}
    if not insecure_http:
        raise BadInput(
            f"--public-url: tokens would cross the network to {public_url} in the clear\n"
            "  next: pass an https:// URL with --tls-cert and --tls-key; or leave it out and use "
            "`tpu deploy server`; or pass --insecure-http on a network that you trust"
        )
    return {**document, "listen": f"0.0.0.0:{parts.port or 80}", "insecure_http": True}


def _gcloud_project() -> str | None:
    """The project that gcloud is set to, if it is installed."""
    if shutil.which("gcloud") is None:
        return None
    try:
        answer = subprocess.run(
            ["gcloud", "config", "get", "project"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _sections(
    project: str, types: Sequence[str], zones: tuple[str, ...], ask: bool, internal_ips: bool
) -> dict[str, Any]:
    """The newest generations exist as Compute Engine instances only; others are TPU VMs."""
    common: dict[str, Any] = {"project": project}
    hidden = {"external_ips": False} if internal_ips else {}
    sections: dict[str, Any] = {}
    for section in ("tpu_vm", "compute"):
        without_runtime = section == "compute"
        own = [
            each for each in types if (type_lookup.find(each).runtime is None) == without_runtime
        ]
        if own:
            first = {} if sections else common
            last = {} if sections else hidden
            sections[section] = {**first, "zones": _zones(own, zones, ask), **last}
    return sections


def _zones(types: Sequence[str], zones: tuple[str, ...], ask: bool) -> list[str]:
    """Each type is offered by one of them; a zone may be newer than the catalogue."""
    offered = {name: tpu_zones.zones_of(type_lookup.find(name).name) for name in types}
    first = list(dict.fromkeys(zone for each in offered.values() for zone in each[:MAX_ZONES]))
    if not zones and ask:
        listed = "; ".join(f"{name} is offered in {', '.join(offered[name])}" for name in types)
        zones = tuple(click.prompt(f"Zones ({listed})", default=",".join(first)).split(","))
    chosen = [fleets.check_zone(zone.strip()) for zone in zones] or first
    for name in types:
        if not any(tpu_zones.is_offered(type_lookup.find(name).name, zone) for zone in chosen):
            wrong = ", ".join(chosen)
            raise BadInput(
                f"{name} is not documented in {wrong}; use {', '.join(offered[name][:4])}"
            )
    return chosen


def _write(file: Path, document: dict[str, Any], *, ask: bool, yes: bool) -> None:
    import yaml

    text = yaml.safe_dump(document, sort_keys=False)
    if file.exists() and file.read_text() != text and not yes:
        if not ask:
            raise exists(file, "edit it, or pass --yes to replace it")
        click.confirm(f"{file} exists; replace it?", abort=True)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o600)
    click.echo(f"wrote {file}:\n")
    for line in text.splitlines():
        click.echo(f"  {line}")
    click.echo()


def _check(wanted: Sequence[tuple[str, Capacity]]) -> None:
    from tpufleet.compose.providers import preflight

    print_checks(preflight(connection.settings(), wanted))


init.add_command(check)

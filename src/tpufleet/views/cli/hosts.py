"""`tpu exec`, `tpu ssh` and `tpu doctor`: the hosts of a slice."""

from __future__ import annotations

import os
import secrets
import shlex
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import click

from tpufleet.errors import BadInput, FleetError, NotFound
from tpufleet.model import durations, encoding
from tpufleet.model.errands import (
    Checkup,
    ErrandKind,
    ErrandOrder,
    ErrandReport,
    ErrandResult,
    Finding,
    Health,
)
from tpufleet.views import text
from tpufleet.views.cli import gcloud, output, sessions
from tpufleet.views.cli.output import json_option

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient
    from tpufleet.model.views import SliceRow

LOOK_SECONDS = 0.3
# A host hears of an errand with its next heartbeat, and tells with the one after.
SLACK = timedelta(seconds=20)
CLOCKS_AGREE = timedelta(seconds=5)
COLOURS = {Health.GOOD: text.GOOD, Health.WARN: text.AMBER, Health.BAD: text.BAD}


@click.command(
    "exec",
    short_help="Run a command on the hosts of a slice.",
    epilog="\b\nExamples:\n  tpu exec train-1 -- df -h /\n"
    "  tpu exec train-1 --host 0 --timeout 5m -- sh -c 'ls /tmp | wc -l'\n",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("slice_id", metavar="SLICE")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--host", type=click.IntRange(min=0), help="Only this host (default: all).")
@click.option("--timeout", default="1m", show_default=True, help="End it after this.")
@json_option
def exec_(
    slice_id: str, command: tuple[str, ...], host: int | None, timeout: str, as_json: bool
) -> int:
    """Run COMMAND on one or all hosts of SLICE, beside its job, through the agents. Only admins.

    No shell is used unless you name one. Each line stands behind the number of its host. The exit
    status is the first that is not 0.
    """
    limit = durations.parse(timeout)
    if limit is None:
        raise BadInput("--timeout: an end is needed; write 1m, say")
    order = ErrandOrder(id=secrets.token_hex(8), command=command, host=host, timeout=limit)
    with sessions.connect() as client:
        report = _await(client, slice_id, order, limit + SLACK)
    if as_json:
        output.emit_json(report)
    else:
        for result in report.results:
            _print(result, label=len(report.hosts) > 1)
    silent = sorted({*report.hosts} - {result.host_id for result in report.results})
    if silent:
        raise FleetError(f"no answer from {', '.join(silent)}; `tpu doctor {slice_id}` says more")
    return next((result.status or 1 for result in report.results if result.status != 0), 0)


@click.command(
    short_help="A shell on a host, through gcloud.",
    epilog="\b\nExamples:\n  tpu ssh train-1\n  tpu ssh train-1 --host 3 -- nvtop\n",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("slice_id", metavar="SLICE")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--host", default=0, type=click.IntRange(min=0), help="Which host.")
@click.option("--dry-run", is_flag=True, help="Only show the gcloud command.")
def ssh(slice_id: str, command: tuple[str, ...], host: int, dry_run: bool) -> None:
    """Open a shell on a host of SLICE. For people: nothing of tpufleet needs ssh."""
    with sessions.connect() as client:
        row = _find(client, slice_id)
    if row.provider != "tpu-vm":
        raise BadInput(f"{slice_id} is no TPU VM; use `tpu exec {slice_id} -- …`")
    project = (sessions.settings().tpu_vm or {}).get("project")
    argv = gcloud.ssh(row.id, row.zone, project, str(host), command)
    if dry_run:
        click.echo(shlex.join(argv))
        return
    gcloud.must_be_here()
    os.execvp(argv[0], argv)


@click.command(
    short_help="Find what ails a slice, and mend it.",
    epilog="\b\nExamples:\n  tpu doctor train-1\n  tpu doctor train-1 --fix\n",
)
@click.argument("slice_id", metavar="SLICE")
@click.option("--fix", is_flag=True, help="Mend what is safe to mend.")
@json_option
def doctor(slice_id: str, fix: bool, as_json: bool) -> int:
    """Look at SLICE and each of its hosts: state, chips, who holds them, stale locks, disks,
    mounts, clock, credentials, versions. Says what each finding means. Only admins.

    The exit status is 1 when anything is bad.
    """
    kind = ErrandKind.MEND if fix else ErrandKind.CHECKUP
    order = ErrandOrder(id=secrets.token_hex(8), kind=kind)
    with sessions.connect() as client:
        row = _find(client, slice_id)
        report = _await(client, slice_id, order, order.timeout + SLACK, row.hosts_seen)
    found: dict[str, list[Finding]] = {slice_id: _of_slice(row)}
    by_host = {result.host_id: result for result in report.results}
    for host in report.hosts:
        found[host] = _of_host(by_host.get(host), report.now)
    if as_json:
        output.emit_json({"slice": row, "findings": found})
    else:
        _show(found)
    bad = any(item.health is Health.BAD for items in found.values() for item in items)
    return int(bad)


def _find(client: FleetClient, slice_id: str) -> SliceRow:
    rows = {row.id: row for row in client.slices(gone=True)}
    if slice_id not in rows:
        raise NotFound(f"no slice is called {slice_id!r}; `tpu slices` lists them")
    return rows[slice_id]  # type: ignore[index]


def _await(
    client: FleetClient,
    slice_id: str,
    order: ErrandOrder,
    within: timedelta,
    expected: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> ErrandReport:
    """Until every host has answered, or every one that gives signs of life, or time is up."""
    client.send_errand(slice_id, order)
    deadline = time.monotonic() + within.total_seconds()
    # Hosts that are silent are not waited for once the others have answered.
    while True:
        report = client.errand(slice_id, order.id)
        enough = report.done or (expected is not None and len(report.results) >= expected)
        if enough or time.monotonic() > deadline:
            return report
        sleep(LOOK_SECONDS)


def _print(result: ErrandResult, *, label: bool) -> None:
    number = result.host_id.rpartition("/")[2]
    for line in result.output.splitlines():
        click.echo(f"[{number}] {text.safe(line)}" if label else text.safe(line))
    told = result.words or (f"exit status {result.status}" if result.status else "")
    if result.cut:
        told = f"{told}; there was more output" if told else "there was more output"
    if told:
        click.echo(f"[{number}] {told}", err=True)


def _of_slice(row: SliceRow) -> list[Finding]:
    healthy = row.state.value in ("ready", "booting", "requested")
    state = Finding(
        check="state",
        health=Health.GOOD if healthy else Health.BAD,
        words=f"{row.state} ({row.reason})",
        meaning="" if healthy else "it is on its way out; its job gets another slice",
    )
    silent = row.hosts - row.hosts_seen
    hosts = Finding(
        check="hosts",
        health=Health.BAD if silent else Health.GOOD,
        words=f"{row.hosts_seen} of {row.hosts} hosts give signs of life",
        meaning="the slice is replaced when a host stays silent" if silent else "",
    )
    return [state, hosts]


def _of_host(result: ErrandResult | None, now: datetime) -> list[Finding]:
    if result is None:
        return [
            Finding(
                check="agent",
                health=Health.BAD,
                words="it does not answer",
                meaning="the host is down, cut off, or still booting",
                cure="look at its serial console, or wait: the slice will be replaced",
            )
        ]
    try:
        checkup = encoding.from_json(result.output, Checkup)
    except BadInput:
        words = result.words or text.one_line(result.output)[:200]
        return [Finding(check="agent", health=Health.BAD, words=f"the check-up failed: {words}")]
    return [*checkup.findings, _clock(checkup.at, now)]


def _clock(theirs: datetime, ours: datetime) -> Finding:
    """The answer was on its way for a moment; more than that is a clock that is wrong."""
    apart = abs(ours - theirs)
    if apart <= SLACK + CLOCKS_AGREE:
        return Finding(check="clock", health=Health.GOOD, words="agrees with the server's")
    return Finding(
        check="clock",
        health=Health.WARN,
        words=f"{text.span(apart)} away from the server's",
        meaning="timestamps in logs and checkpoints mislead, and credentials may be refused",
        cure="check the host's time service (chrony or systemd-timesyncd)",
    )


def _show(found: dict[str, list[Finding]]) -> None:
    rows = []
    for where, items in found.items():
        for item in items:
            words = "; ".join(part for part in (item.words, item.meaning, item.cure) if part)
            health = "mended" if item.mended else item.health.value
            rows.append((where, item.check, (health, COLOURS[item.health]), words))
    output.table(("WHERE", "CHECK", "HEALTH", "WORDS"), rows, "nothing to look at")

"""`tpu doctor`: what ails a slice, what it means, and what can be done."""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import click

from tpufleet.errors import BadInput
from tpufleet.model import encoding
from tpufleet.model.host_commands import (
    CheckResult,
    DiagnosticReport,
    Health,
    HostCommandKind,
    HostCommandRequest,
    HostCommandResult,
)
from tpufleet.model.slices import SliceState
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.exec import HEARTBEAT_ALLOWANCE, find_slice, wait_for_results
from tpufleet.views.cli.output import json_option

if TYPE_CHECKING:
    from tpufleet.model.api_types import SliceRow

LOOK_TAKES = timedelta(seconds=20)
CLOCKS_AGREE = timedelta(seconds=5)
COLOURS = {Health.OK: text.GOOD, Health.WARNING: text.AMBER, Health.FAILED: text.BAD}
_MEANINGS = {
    SliceState.DOOMED: "it will be taken away; its job saves, and gets another slice",
    SliceState.RELEASING: "it is on its way out; its job gets another slice",
    SliceState.GONE: "nothing is left to look at; its job gets another slice",
}
ENDED_STATES = (SliceState.RELEASING, SliceState.GONE)


@click.command(
    short_help="Find what ails a slice, and mend it.",
    epilog="\b\nExamples:\n  tpu doctor train-1\n  tpu doctor train-1 --fix\n",
)
@click.argument("slice_id", metavar="SLICE")
@click.option("--fix", is_flag=True, help="Mend what is safe to mend.")
@click.option("--all", "every", is_flag=True, help="Show each host's good findings too.")
@json_option
def doctor(slice_id: str, fix: bool, every: bool, as_json: bool) -> int:
    """Look at SLICE and each of its hosts: state, chips, who holds them, stale locks, disks,
    mounts, clock, credentials, versions. Says what each finding means. Only admins.

    What is good on several hosts stands in one line. --fix removes stale locks and closes files
    that others could read; it never ends a process. The exit status is 1 when anything is bad.
    """
    kind = HostCommandKind.REPAIR if fix else HostCommandKind.DIAGNOSE
    order = HostCommandRequest(id=secrets.token_hex(8), kind=kind, timeout=LOOK_TAKES)
    with connection.connect() as client:
        row = find_slice(client, slice_id)
        found: dict[str, list[CheckResult]] = {slice_id: _of_slice(row)}
        if row.state not in ENDED_STATES:  # nobody is there to answer
            report = wait_for_results(
                client, slice_id, order, LOOK_TAKES + HEARTBEAT_ALLOWANCE, row.hosts_seen
            )
            by_host = {result.host_id: result for result in report.results}
            for host in report.hosts:
                found[host] = _of_host(by_host.get(host), report.now)
    if as_json:
        output.print_json({"slice": row, "findings": found})
    else:
        _show(found, every)
    bad = any(item.health is Health.FAILED for items in found.values() for item in items)
    return int(bad)


def _of_slice(row: SliceRow) -> list[CheckResult]:
    healthy = row.state not in _MEANINGS
    state = CheckResult(
        check="state",
        health=Health.OK if healthy else Health.FAILED,
        message=f"{row.state} ({row.reason})",
        impact="" if healthy else _MEANINGS[row.state],
    )
    if row.state in ENDED_STATES:
        return [state]
    silent = row.hosts - row.hosts_seen
    hosts = CheckResult(
        check="hosts",
        health=Health.FAILED if silent else Health.OK,
        message=f"{row.hosts_seen} of {row.hosts} hosts give signs of life",
        impact="the slice is replaced when a host stays silent" if silent else "",
    )
    return [state, hosts]


def _of_host(result: HostCommandResult | None, now: datetime) -> list[CheckResult]:
    if result is None:
        return [
            CheckResult(
                check="agent",
                health=Health.FAILED,
                message="it does not answer",
                impact="the host is down, cut off, or still booting",
                remedy="look at its serial console, or wait: the slice will be replaced",
            )
        ]
    try:
        checkup = encoding.from_json(result.output, DiagnosticReport)
    except BadInput:
        words = result.message or text.one_line(result.output)[:200]
        return [
            CheckResult(
                check="agent", health=Health.FAILED, message=f"the check-up failed: {words}"
            )
        ]
    return [*checkup.checks, _clock(checkup.at, now)]


def _clock(theirs: datetime, ours: datetime) -> CheckResult:
    """The answer was on its way for a moment; more than that is a clock that is wrong."""
    apart = abs(ours - theirs)
    if apart <= HEARTBEAT_ALLOWANCE + CLOCKS_AGREE:
        return CheckResult(check="clock", health=Health.OK, message="agrees with the server's")
    return CheckResult(
        check="clock",
        health=Health.WARNING,
        message=f"{text.duration(apart)} away from the server's",
        impact="timestamps in logs and checkpoints mislead, and credentials may be refused",
        remedy="check the host's time service (chrony or systemd-timesyncd)",
    )


def _show(found: dict[str, list[CheckResult]], every: bool) -> None:
    """What is not good first needs the eye, so what is good is told once for all hosts."""
    rows: list[tuple[output.Cell, ...]] = []
    alike: dict[str, list[tuple[str, CheckResult]]] = {}
    for where, items in found.items():
        for item in items:
            if every or "/" not in where or item.health is not Health.OK or item.repaired:
                rows.append(_row(where, item, item.message))
            else:
                alike.setdefault(item.check, []).append((where, item))
    for group in alike.values():
        hosts = [where for where, _ in group]
        words = list(dict.fromkeys(item.message for _, item in group))
        told = words[0] if len(words) == 1 else f"{words[0]} (host {_number(hosts[0])})"
        rows.append(_row(_named(hosts), group[0][1], told))
    output.print_table(("WHERE", "CHECK", "HEALTH", "WORDS"), rows, "nothing to look at")


def _row(where: str, item: CheckResult, words: str) -> tuple[output.Cell, ...]:
    health = "mended" if item.repaired else item.health.value
    told = "; ".join(part for part in (words, item.impact, item.remedy) if part)
    return where, item.check, (health, COLOURS[item.health]), told


def _named(hosts: list[str]) -> str:
    """`hosts 0-2, 5`."""
    if len(hosts) == 1:
        return f"host {_number(hosts[0])}"
    numbers = sorted(map(_number, hosts))
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return "hosts " + ", ".join("-".join(map(str, span)) for span in spans)


def _number(host: str) -> int:
    return int(host.rpartition("/")[2])

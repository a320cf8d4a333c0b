"""`tpu doctor`: diagnose and repair a slice; inject faults into simulated ones."""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import click

from tpufleet.errors import BadInput
from tpufleet.model.fleet.host_commands import (
    HEARTBEAT_ALLOWANCE,
    CheckResult,
    DiagnosticReport,
    Health,
    HostCommandKind,
    HostCommandRequest,
    HostCommandResult,
)
from tpufleet.model.fleet.slices import SliceState
from tpufleet.model.values import encoding
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import example, json_option
from tpufleet.views.cli.slices.host_commands import find_slice, wait_for_results

if TYPE_CHECKING:
    from tpufleet.model.api_types import SliceRow

DIAGNOSIS_TIMEOUT = timedelta(seconds=20)
CLOCK_TOLERANCE = timedelta(seconds=5)
COLOURS = {Health.OK: text.GOOD, Health.WARNING: text.AMBER, Health.FAILED: text.BAD}
_IMPACTS = {
    SliceState.DOOMED: "draining after a notice; its job writes a checkpoint and moves",
    SliceState.RELEASING: "being deleted; its job gets another slice",
    SliceState.GONE: "deleted; its job gets another slice",
}
WITHOUT_HOSTS = (SliceState.RELEASING, SliceState.GONE)
# The faults of the local provider; the server validates them.
FAULTS = ("preempt", "preempt-notice", "maintenance", "kill-host", "stall-host")
HOST_FAULTS = ("kill-host", "stall-host")


@click.command(
    cls=output.CommandGroup,
    epilog="\b\nExamples:\n  tpu doctor train\n  tpu doctor train-1 --fix\n"
    "  tpu doctor fault train preempt\n",
)
@click.argument("target", metavar="JOB|SLICE")
@click.option("--fix", is_flag=True, help="Repair what is safe to repair.")
@json_option
def doctor(target: str, fix: bool) -> int:
    """Check a slice, or that of a JOB, and each of its hosts: state, chips and their users, stale
    locks, disks, mounts, clock, credentials, versions; and explain each finding. Requires that the
    job is yours, or the admin role.

    Checks that passed on several hosts share one line; --json has all of them. --fix removes stale
    locks and restricts the mode of credential files; it never kills a process. The exit status is 1
    when any check failed.
    """
    kind = HostCommandKind.REPAIR if fix else HostCommandKind.DIAGNOSE
    request = HostCommandRequest(id=secrets.token_hex(8), kind=kind, timeout=DIAGNOSIS_TIMEOUT)
    with connection.connect() as client:
        row = find_slice(client, target)
        slice_id = row.id
        checks: dict[str, list[CheckResult]] = {slice_id: _slice_checks(row)}
        if row.state not in WITHOUT_HOSTS:
            report = wait_for_results(
                client, slice_id, request, DIAGNOSIS_TIMEOUT + HEARTBEAT_ALLOWANCE, row.hosts_seen
            )
            by_host = {result.host_id: result for result in report.results}
            for host in report.hosts:
                checks[host] = _host_checks(by_host.get(host), report.now)
    if output.as_json():
        output.print_json({"slice": row, "findings": checks})
    else:
        _show(checks)
    return int(any(item.health is Health.FAILED for items in checks.values() for item in items))


def _slice_checks(row: SliceRow) -> list[CheckResult]:
    message, impact = f"{row.state} ({row.reason})", _IMPACTS.get(row.state)
    state = (
        CheckResult.failed("state", message, impact) if impact else CheckResult.ok("state", message)
    )
    if row.state in WITHOUT_HOSTS:
        return [state]
    message = f"{row.hosts_seen} of {row.hosts} hosts send heartbeats"
    if row.hosts_seen == row.hosts:
        return [state, CheckResult.ok("hosts", message)]
    impact = "the slice is replaced if a host stays silent"
    return [state, CheckResult.failed("hosts", message, impact)]


def _host_checks(result: HostCommandResult | None, now: datetime) -> list[CheckResult]:
    if result is None:
        impact = "the host is down, unreachable or still booting"
        remedy = "check its serial console, or wait for the slice to be replaced"
        return [CheckResult.failed("agent", "no answer", impact, remedy)]
    try:
        report = encoding.from_json(result.output, DiagnosticReport)
    except BadInput:
        evidence = result.message or text.one_line(result.output)[:200]
        return [CheckResult.failed("agent", f"diagnosis failed: {evidence}")]
    return [*report.checks, _clock_check(report.at, now)]


def _clock_check(theirs: datetime, ours: datetime) -> CheckResult:
    """The report takes up to two heartbeats to arrive; more than that is a wrong clock."""
    difference = abs(ours - theirs)
    if difference <= HEARTBEAT_ALLOWANCE + CLOCK_TOLERANCE:
        return CheckResult.ok("clock", "agrees with the server's")
    return CheckResult.warning(
        "clock",
        f"differs from the server's by {text.duration(difference)}",
        "timestamps in logs and checkpoints are wrong, and credentials may be rejected",
        "check the host's time service (chrony or systemd-timesyncd)",
    )


def _show(checks: dict[str, list[CheckResult]]) -> None:
    """Problems host by host; checks that passed once for all hosts."""
    rows: list[tuple[output.Cell, ...]] = []
    passed: dict[str, list[tuple[str, CheckResult]]] = {}
    for where, items in checks.items():
        for item in items:
            if "/" not in where or item.health is not Health.OK or item.repaired:
                rows.append(_row(where, item, item.message))
            else:
                passed.setdefault(item.check, []).append((where, item))
    for group in passed.values():
        hosts = [where for where, _ in group]
        messages = list(dict.fromkeys(item.message for _, item in group))
        suffix = "" if len(messages) == 1 else f" (host {_number(hosts[0])})"
        rows.append(_row(_host_ranges(hosts), group[0][1], messages[0] + suffix))
    output.print_table(("WHERE", "CHECK", "HEALTH", "MESSAGE"), rows)


def _row(where: str, item: CheckResult, message: str) -> tuple[output.Cell, ...]:
    health = "repaired" if item.repaired else item.health.value
    explanation = "; ".join(part for part in (message, item.impact, item.remedy) if part)
    return where, item.check, (health, COLOURS[item.health]), explanation


def _host_ranges(hosts: list[str]) -> str:
    """`hosts 0-2, 5`."""
    if len(hosts) == 1:
        return f"host {_number(hosts[0])}"
    ranges: list[list[int]] = []
    for number in sorted(map(_number, hosts)):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return "hosts " + ", ".join("-".join(map(str, span)) for span in ranges)


def _number(host: str) -> int:
    return int(host.rpartition("/")[2])


@doctor.command(epilog=example("tpu doctor fault train kill-host --host 1"))
@click.argument("target", metavar="JOB|SLICE")
@click.argument("kind", metavar="KIND", type=click.Choice(FAULTS))
@click.option("--host", type=click.IntRange(min=0), help="Host, for a fault of one host (0).")
@json_option
def fault(target: str, kind: str, host: int | None) -> None:
    """Inject a fault of KIND into a slice, or that of a JOB, to test recovery. Simulated slices
    only. Requires that the job is yours, or the admin role.

    \b
    preempt         remove the slice without notice
    preempt-notice  preemption notice, then remove the slice
    maintenance     maintenance notice, then remove the slice
    kill-host       kill one host
    stall-host      one host stops responding without dying
    """
    if kind in HOST_FAULTS and host is None:
        host = 0
    with connection.connect() as client:
        slice_id = find_slice(client, target).id
        client.inject_fault(slice_id, kind, host=host)
    output.print_result(
        {"slice": slice_id, "fault": kind, "host": host},
        f"injected {kind} into {slice_id}; follow with `tpu events -f`",
    )

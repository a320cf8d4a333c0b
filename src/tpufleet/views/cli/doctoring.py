"""`tpu doctor`: what ails a slice, what it means, and what can be done."""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import click

from tpufleet.errors import BadInput
from tpufleet.model import encoding
from tpufleet.model.errands import (
    Checkup,
    ErrandKind,
    ErrandOrder,
    ErrandResult,
    Finding,
    Health,
)
from tpufleet.model.slices import SliceState
from tpufleet.views import text
from tpufleet.views.cli import output, sessions
from tpufleet.views.cli.hosts import SLACK, answers, find
from tpufleet.views.cli.output import json_option

if TYPE_CHECKING:
    from tpufleet.model.views import SliceRow

LOOK_TAKES = timedelta(seconds=20)
CLOCKS_AGREE = timedelta(seconds=5)
COLOURS = {Health.GOOD: text.GOOD, Health.WARN: text.AMBER, Health.BAD: text.BAD}
_MEANINGS = {
    SliceState.DOOMED: "it will be taken away; its job saves, and gets another slice",
    SliceState.RELEASING: "it is on its way out; its job gets another slice",
    SliceState.GONE: "nothing is left to look at; its job gets another slice",
}
OVER = (SliceState.RELEASING, SliceState.GONE)


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
    kind = ErrandKind.MEND if fix else ErrandKind.CHECKUP
    order = ErrandOrder(id=secrets.token_hex(8), kind=kind, timeout=LOOK_TAKES)
    with sessions.connect() as client:
        row = find(client, slice_id)
        found: dict[str, list[Finding]] = {slice_id: _of_slice(row)}
        if row.state not in OVER:  # nobody is there to answer
            report = answers(client, slice_id, order, LOOK_TAKES + SLACK, row.hosts_seen)
            by_host = {result.host_id: result for result in report.results}
            for host in report.hosts:
                found[host] = _of_host(by_host.get(host), report.now)
    if as_json:
        output.emit_json({"slice": row, "findings": found})
    else:
        _show(found, every)
    bad = any(item.health is Health.BAD for items in found.values() for item in items)
    return int(bad)


def _of_slice(row: SliceRow) -> list[Finding]:
    healthy = row.state not in _MEANINGS
    state = Finding(
        check="state",
        health=Health.GOOD if healthy else Health.BAD,
        words=f"{row.state} ({row.reason})",
        meaning="" if healthy else _MEANINGS[row.state],
    )
    if row.state in OVER:
        return [state]
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


def _show(found: dict[str, list[Finding]], every: bool) -> None:
    """What is not good first needs the eye, so what is good is told once for all hosts."""
    rows: list[tuple[output.Cell, ...]] = []
    alike: dict[str, list[tuple[str, Finding]]] = {}
    for where, items in found.items():
        for item in items:
            if every or "/" not in where or item.health is not Health.GOOD or item.mended:
                rows.append(_row(where, item, item.words))
            else:
                alike.setdefault(item.check, []).append((where, item))
    for group in alike.values():
        hosts = [where for where, _ in group]
        words = list(dict.fromkeys(item.words for _, item in group))
        told = words[0] if len(words) == 1 else f"{words[0]} (host {_number(hosts[0])})"
        rows.append(_row(_named(hosts), group[0][1], told))
    output.table(("WHERE", "CHECK", "HEALTH", "WORDS"), rows, "nothing to look at")


def _row(where: str, item: Finding, words: str) -> tuple[output.Cell, ...]:
    health = "mended" if item.mended else item.health.value
    told = "; ".join(part for part in (words, item.meaning, item.cure) if part)
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

"""What people see of an extraction: the plan, the progress, the state of datasets, the verdict."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from tpufleet.runtime.units import Units
from tpufleet.workloads.activations import plans
from tpufleet.workloads.activations.storage import Storage

HEADINGS = ("DATASET", "STATUS", "SAMPLES", "SHARDS", "STORED")


def show_plan(plan: plans.Plan, *, as_json: bool) -> None:
    facts = plan.estimate
    if as_json:
        click.echo(json.dumps({"identity": plan.identity, **facts}))
        return
    about = "" if facts["exact"] else "about "
    rows = [
        ("samples", f"{facts['samples']:,} ({about}{facts['skipped']:,} skipped{_why(facts)})"),
        ("tokens", f"{about}{facts['tokens']:,}"),
        ("sites", f"{len(plan.sites)}: {_few(plan.sites)}"),
        ("output", f"{about}{size(facts['bytes'])} as {plan.dtype}"),
        ("padded", f"{size(facts['bytes_if_padded'])}, if every sample were padded"),
        ("units", f"{facts['units']:,} of {plan.unit_samples:,} samples"),
        (
            "hours",
            "unknown; say --chips or --rate" if facts["hours"] is None else f"{facts['hours']:.2f}",
        ),
        ("cost", "unknown" if facts["cost"] is None else f"${facts['cost']:,.2f}"),
    ]
    for name, value in rows:
        click.echo(f"{name:>8}  {value}")


class Progress:
    """One line on a terminal, kept up to date; elsewhere a line now and then."""

    def __init__(self, every: float = 1.0):
        self._live = sys.stderr.isatty()
        self._every = every if self._live else 30.0
        self._last = float("-inf")

    def __call__(self, meter: Any) -> None:
        now = time.monotonic()
        if now - self._last < self._every:
            return
        self._last = now
        click.echo(
            ("\r\x1b[K" if self._live else "") + progress_line(meter.snapshot()),
            err=True,
            nl=not self._live,
        )


def progress_line(facts: Mapping[str, Any]) -> str:
    share = facts["samples"] / facts["total"] if facts["total"] else 1.0
    parts = [
        f"{facts['samples']:,}/{facts['total']:,} samples ({share:.0%})",
        f"{facts['tokens_per_second']:,.0f} tokens/s",
    ]
    if facts["mfu"] is not None:
        parts.append(f"MFU {facts['mfu']:.0%}")
    parts.append("queues " + " ".join(f"{name}:{n}" for name, n in facts["queues"].items()))
    if facts["limit"]:
        parts.append(f"limited by {facts['limit']}")
    if facts["seconds_left"] is not None:
        parts.append(f"{_span(facts['seconds_left'])} left")
    return " · ".join(parts)


def show_end(meter: Any) -> None:
    facts = meter.snapshot()
    click.echo(
        f"\n{facts['units']} units by this worker; {facts['samples']:,} of {facts['total']:,} "
        f"samples committed, {facts['skipped']:,} of them skipped; "
        f"{facts['tokens_per_second']:,.0f} tokens/s",
        err=True,
    )


def watch_status(storages: Mapping[str, Storage], *, as_json: bool, every: float | None) -> None:
    """Show the status; with `every`, again and again until all datasets are done."""
    while True:
        show_status(storages, as_json=as_json)
        if every is None or all(
            state(storage)["status"] == "DONE" for storage in storages.values()
        ):
            return
        time.sleep(every)
        click.clear()


def show_status(storages: Mapping[str, Storage], *, as_json: bool) -> None:
    rows = {out: state(storage) for out, storage in storages.items()}
    if as_json:
        click.echo(json.dumps(rows))
        return
    table = [
        (
            out,
            row["status"],
            f"{row['samples']:,}/{row['total']:,}",
            f"{row['shards']:,}/{row['units']:,}",
            size(row["bytes"]),
        )
        for out, row in rows.items()
    ]
    totals = {
        name: sum(row[name] for row in rows.values()) for name in ("samples", "shards", "bytes")
    }
    table.append(
        ("TOTALS", "", f"{totals['samples']:,}", f"{totals['shards']:,}", size(totals["bytes"]))
    )
    widths = [max(len(row[n]) for row in [HEADINGS, *table]) for n in range(5)]
    for row in [HEADINGS, *table]:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    counts = {
        name: sum(row[name] for row in rows.values()) for name in ("healthy", "working", "lost")
    }
    click.echo(
        f"Healthy: {counts['healthy']}  Working: {counts['working']}  "
        f"Needs recovery: {counts['lost']}  Last update: {time.strftime('%H:%M:%S')}"
    )


def state(storage: Storage, now: float | None = None, lease: float = 60.0) -> dict[str, Any]:
    """A dataset's state, read from its records."""
    plan = plans.load(storage)
    units = Units(storage, count=plan.units, worker="reader")
    commits, held, beats = units.committed(), units.holders(), units.beats()
    now = time.time() if now is None else now
    alive = {worker for worker, at in beats.items() if now - at <= lease}
    lost = {claim.worker for claim in held.values()} - alive
    done = len(commits) == plan.units
    return {
        "status": "DONE" if done else "RUNNING" if alive else "WAITING" if not held else "STOPPED",
        "samples": sum(len(plan.span(unit)) for unit in commits),
        "total": plan.samples,
        "shards": len(commits),
        "units": plan.units,
        "bytes": sum(commit.outcome["bytes"] for commit in commits.values()),
        "tokens": sum(commit.outcome["tokens"] for commit in commits.values()),
        "healthy": len(alive),
        "working": len({claim.worker for claim in held.values()} & alive),
        "lost": len(lost),
        "workers": sorted(alive),
    }


def show_report(report: Any, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({**asdict(report), "whole": report.whole}))
        return
    click.echo(
        f"{report.committed:,} of {report.units:,} units, {report.samples:,} samples, "
        f"{report.tokens:,} tokens, {size(report.bytes)}"
    )
    for problem in report.problems:
        click.echo(f"  wrong: {problem}")
    for name in report.leftovers:
        click.echo(f"  left by a dead worker (harmless): {name}")
    click.echo("whole: every sample once, every byte right" if report.whole else "NOT whole")


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if count < 1000 or unit == "PB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def _why(facts: Mapping[str, Any]) -> str:
    reason = facts.get("why_skipped") or ""
    return f", such as: {reason[:120]}" if reason else ""


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} … {names[-1]}"


def _span(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"

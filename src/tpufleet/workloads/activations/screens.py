"""What people see of an extraction: the plan, the progress, the state of datasets, the verdict."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from tpufleet.workloads.activations import formatting, plans
from tpufleet.workloads.activations.io.storage import Storage
from tpufleet.workloads.activations.pipeline import dataset_status

HEADINGS = ("DATASET", "STATUS", "SAMPLES", "SHARDS", "STORED")


def show_plan(plan: plans.ExtractionPlan, *, as_json: bool) -> None:
    facts = plan.estimate
    if as_json:
        click.echo(json.dumps({"identity": plan.identity, **facts}))
        return
    about = "" if facts["exact"] else "about "
    rows = [
        ("samples", f"{facts['samples']:,} ({about}{facts['skipped']:,} skipped{_why(facts)})"),
        ("tokens", f"{about}{facts['tokens']:,}"),
        ("sites", f"{len(plan.sites)}: {_few(plan.sites)}"),
        ("output", f"{about}{formatting.format_bytes(facts['bytes'])} as {plan.dtype}"),
        (
            "padded",
            f"{formatting.format_bytes(facts['bytes_if_padded'])}, if every sample were padded",
        ),
        ("units", f"{facts['units']:,} of {plan.unit_samples:,} samples"),
        ("hours", formatting.format_amount(facts["hours"], "", "unknown; say --chips or --rate")),
        ("cost", formatting.format_amount(facts["cost"], "$", "unknown")),
    ]
    for name, value in rows:
        click.echo(f"{name:>8}  {value}")


def show_start(plan: plans.ExtractionPlan) -> None:
    click.echo(
        f"{plan.samples:,} samples in {plan.units:,} units; loading {plan.model}, and compiling "
        "for the first batch",
        err=True,
    )


class ProgressLine:
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
        parts.append(f"{formatting.format_duration(facts['seconds_left'])} left")
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
    watched = {out: dataset_status.DatasetMonitor(storage) for out, storage in storages.items()}
    while True:
        rows = {out: one.status() for out, one in watched.items()}
        if every is not None and not as_json and sys.stdout.isatty():
            click.clear()
        show_status(rows, as_json=as_json)
        if every is None or all(row["status"] == "DONE" for row in rows.values()):
            return
        time.sleep(every)


def show_status(rows: Mapping[str, Mapping[str, Any]], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(rows))
        return
    table = [
        (
            out,
            row["status"],
            f"{row['samples']:,}/{row['total']:,}",
            f"{row['shards']:,}/{row['units']:,}",
            formatting.format_bytes(row["bytes"]),
        )
        for out, row in rows.items()
    ]
    totals = {
        name: sum(row[name] for row in rows.values()) for name in ("samples", "shards", "bytes")
    }
    whole = (
        f"{totals['samples']:,}",
        f"{totals['shards']:,}",
        formatting.format_bytes(totals["bytes"]),
    )
    table.append(("TOTALS", "", *whole))
    widths = [max(len(row[n]) for row in [HEADINGS, *table]) for n in range(5)]
    for row in [HEADINGS, *table]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())
    counts = {
        name: sum(row[name] for row in rows.values()) for name in ("healthy", "working", "lost")
    }
    click.echo(
        f"Healthy: {counts['healthy']}  Working: {counts['working']}  "
        f"Needs Recovery: {counts['lost']}  Last update: {time.strftime('%H:%M:%S')}"
    )


def show_sample(dataset: Any, sample: int, *, as_json: bool) -> None:
    about = dict(dataset.about(sample))
    sites = {}
    for name in dataset.sites:
        values = dataset.read(sample, name)
        wide = values.astype("float32")
        sites[name] = {
            "shape": list(values.shape),
            "dtype": str(values.dtype),
            "mean": float(wide.mean()) if wide.size else None,
            "largest": float(abs(wide).max()) if wide.size else None,
        }
    tokens = dataset.tokens(sample).tolist()
    if as_json:
        click.echo(json.dumps({**about, "token_ids": tokens, "sites": sites}))
        return
    for name, value in {**about, "token_ids": tokens}.items():
        text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else repr(value)
        click.echo(f"{name:>14}  {text if len(text) <= 100 else text[:99] + '…'}")
    for name, facts in sites.items():
        shape = " × ".join(map(str, facts["shape"]))
        spread = (
            ""
            if facts["mean"] is None
            else (f"  mean {facts['mean']:+.4g}, largest {facts['largest']:.4g}")
        )
        click.echo(f"{name:>14}  {shape} {facts['dtype']}{spread}")


def show_report(report: Any, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({**asdict(report), "whole": report.whole}))
        return
    click.echo(
        f"{report.committed:,} of {report.units:,} units, {report.samples:,} samples, "
        f"{report.tokens:,} tokens, {formatting.format_bytes(report.bytes)}"
    )
    for problem in report.problems:
        click.echo(f"  wrong: {problem}")
    for name in report.leftovers:
        click.echo(f"  left by a dead worker (harmless): {name}")
    click.echo("whole: every sample once, every byte right" if report.whole else "NOT whole")


def _why(facts: Mapping[str, Any]) -> str:
    reason = facts.get("why_skipped") or ""
    return f", such as: {reason[:120]}" if reason else ""


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} … {names[-1]}"

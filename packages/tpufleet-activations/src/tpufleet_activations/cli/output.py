"""Output of `tpu extract`: estimates, progress, status, samples, verification reports."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
import msgspec

from tpufleet_activations import plans
from tpufleet_activations.formatting import (
    extract_command,
    format_amount,
    format_bytes,
    format_count,
    format_duration,
    format_health,
)
from tpufleet_activations.io.storage import Storage
from tpufleet_activations.pipeline import dataset_status

if TYPE_CHECKING:
    from tpufleet_activations.io.datasets import Dataset
    from tpufleet_activations.io.latents import LatentIndex
    from tpufleet_activations.io.verification import VerificationReport
    from tpufleet_activations.pipeline.progress_meter import Meter

LATENT_ROWS = 16
HEADINGS = ("DATASET", "STATUS", "SAMPLES", "SHARDS", "STORED")


def print_json(value: Any) -> None:
    """Numbers that are not finite, which JSON lacks, become null."""
    click.echo(msgspec.json.encode(value).decode())


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from tpufleet.views.cli import output  # a worker need not wait for this import

    output.print_table(titles, rows, "")


def show_plan(plan: plans.ExtractionPlan, *, as_json: bool) -> None:
    estimate = plan.estimate
    if as_json:
        print_json({"identity": plan.identity, **estimate})
        return
    about = "" if estimate["exact"] else "about "
    skipped = f"{about}{estimate['skipped']:,} skipped{_skip_reason(estimate)}"
    rows = [
        ("samples", f"{estimate['samples']:,} ({skipped})"),
        ("tokens", f"{about}{estimate['tokens']:,}{_stored(estimate)}"),
        ("sites", f"{len(plan.sites)}: {_abbreviate(plan.sites)}"),
        (
            "output",
            f"{about}{format_bytes(estimate['bytes'])} as {plan.dtype}, computed in {plan.compute}",
        ),
        (
            "padded",
            f"{format_bytes(estimate['bytes_if_padded'])}, if every sample were padded",
        ),
        ("units", f"{estimate['units']:,} of {format_count(plan.unit_samples, 'sample')}"),
        ("hours", format_amount(estimate["hours"], "", "unknown; pass --chips")),
        ("cost", format_amount(estimate["cost"], "$", "unknown")),
    ]
    for name, value in rows:
        click.echo(f"{name:>8}  {value}")


def warn_of_positions(plan: plans.ExtractionPlan, *, chosen: bool) -> None:
    """That the model was not made for so many tokens. `chosen`: --max-length was passed; its
    default matters only for samples that are long."""
    limit, longest = plan.estimate["model_limit"], plan.estimate["longest"]
    if limit is None or plan.max_length <= limit or not (chosen or longest > limit):
        return
    click.echo(
        f"warning: --max-length {plan.max_length:,} is beyond the model's limit of {limit:,} "
        "tokens (max_position_embeddings); activations of later tokens mean little\n"
        f"  next: pass --max-length {limit}, and --too-long cut or split to keep longer samples",
        err=True,
    )


def show_existing(storage: Storage, out: str, *, as_json: bool) -> None:
    """Of a plan that was written before: how far it is."""
    status = dataset_status.DatasetMonitor(storage).status()
    done = status["status"] == "DONE"
    click.echo(
        f"this plan exists already, {status['samples']:,} of {status['total']:,} samples done"
        + ("" if done else f"; continue with {extract_command('run', out)}"),
        err=as_json,
    )


def show_complete(plan: plans.ExtractionPlan, out: str, *, as_json: bool) -> None:
    """Of a run that has nothing to do."""
    from tpufleet_activations.pipeline.progress_meter import Meter

    if as_json:
        show_end(Meter(plan, samples_before=plan.samples), as_json=True)
        return
    click.echo(f"{out} is already complete: {_size(plan)}; nothing to run", err=True)


def show_interrupted(
    plan: plans.ExtractionPlan, storage: Storage, out: str, *, as_json: bool, meter: Meter | None
) -> None:
    """Of a run that Ctrl-C ended, perhaps before it had a meter."""
    from tpufleet_activations.pipeline.progress_meter import Meter

    if as_json:
        if meter is None:
            samples = dataset_status.DatasetMonitor(storage).status()["samples"]
            meter = Meter(plan, samples_before=samples)
        show_end(meter, as_json=True, stopped=True)
    show_resume("interrupted", out)


def show_resume(ended: str, out: str) -> None:
    resume = extract_command("run", out)
    click.echo(f"\n{ended}; committed units are kept. Resume with {resume}", err=True)


def show_start(plan: plans.ExtractionPlan, model: str) -> None:
    click.echo(f"{_size(plan)}; loading {model} and compiling the first batch", err=True)


class ProgressLine:
    """A progress line: updated in place on a terminal, else printed every 30 s."""

    def __init__(self, every: float = 1.0):
        self._live = sys.stderr.isatty()
        self._every = every if self._live else 30.0
        self._last = float("-inf")

    def __call__(self, meter: Meter) -> None:
        now = time.monotonic()
        if now - self._last < self._every:
            return
        self._last = now
        if self._live:  # a line that wraps could not be replaced
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            line = progress_line(meter.snapshot(), columns - 1)
            click.echo(f"\r\x1b[K{line}", err=True, nl=False)
        else:
            click.echo(progress_line(meter.snapshot()), err=True)


def progress_line(snapshot: Mapping[str, Any], columns: int | None = None) -> str:
    """With `columns`, what fits; what matters least comes last."""
    share = snapshot["samples"] / snapshot["total"] if snapshot["total"] else 1.0
    parts = [f"{snapshot['samples']:,}/{snapshot['total']:,} samples ({share:.0%})"]
    if snapshot["tokens_per_second"] is not None:
        parts.append(f"{snapshot['tokens_per_second']:,.0f} tokens/s")
    if snapshot["seconds_left"] is not None and snapshot["samples"] < snapshot["total"]:
        parts.append(f"{format_duration(snapshot['seconds_left'])} left")
    if snapshot["waiting"]:
        parts.append(snapshot["waiting"])
    elif snapshot["limit"]:
        parts.append(f"limited by {snapshot['limit']}")
    if snapshot["mfu"] is not None:
        parts.append(f"MFU {snapshot['mfu']:.0%}")
    if snapshot["padding"] is not None:
        parts.append(f"padding {snapshot['padding']:.0%}")
    line = " · ".join(parts)
    return line if columns is None or len(line) <= columns else line[: columns - 1] + "…"


def _size(plan: plans.ExtractionPlan) -> str:
    return f"{format_count(plan.samples, 'sample')} in {format_count(plan.units, 'unit')}"


def _batches(chosen: Mapping[str, Any]) -> str:
    """What a worker uses, and who chose it."""
    return f"batches of {chosen['batch_tokens']:,} tokens, {chosen['batches_in_flight']} in flight"


def show_end(meter: Meter, *, as_json: bool = False, stopped: bool = False) -> None:
    """`stopped`: the run was asked to, before all was committed."""
    snapshot = meter.snapshot()
    if as_json:
        print_json({**snapshot, "stopped": stopped})
        return
    rate, padding = snapshot["tokens_per_second"], snapshot["padding"]
    click.echo(
        f"\nthis worker committed {format_count(snapshot['units'], 'unit')}"
        + (f" at {rate:,.0f} tokens/s" if rate is not None else "")
        + f"; {snapshot['samples']:,} of "
        f"{snapshot['total']:,} samples are committed; {snapshot['skipped']:,} skipped here; "
        + (
            f"{format_count(snapshot['fenced'], 'unit')} left to workers that had taken over; "
            if snapshot["fenced"]
            else ""
        )
        + (f"padding {padding:.0%}, " if padding is not None else "")
        + f"{format_count(snapshot['programs'], 'program')} compiled in "
        f"{snapshot['compile_seconds']:.0f} s{_start(snapshot)}"
        + (f"; {_batches(snapshot['calibration'])}" if snapshot["calibration"] else ""),
        err=True,
    )


def _start(snapshot: Mapping[str, Any]) -> str:
    """How long the first batch had to wait, and for what."""
    if snapshot["start_seconds"] is None:
        return ""
    slow = [f"{name} {took:.1f} s" for name, took in snapshot["start"].items() if took >= 0.1]
    parts = f" ({', '.join(slow)})" if slow else ""
    return f"; first batch after {snapshot['start_seconds']:.1f} s{parts}"


def watch_status(storages: Mapping[str, Storage], *, as_json: bool, every: float | None) -> None:
    """Show the status; with `every`, refresh until all datasets are complete."""
    monitors = {out: dataset_status.DatasetMonitor(storage) for out, storage in storages.items()}
    while True:
        rows = {out: monitor.status() for out, monitor in monitors.items()}
        if every is not None and not as_json and sys.stdout.isatty():
            click.clear()
        show_status(rows, as_json=as_json)
        if every is None or all(row["status"] == "DONE" for row in rows.values()):
            return
        time.sleep(every)


def show_status(rows: Mapping[str, Mapping[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    table = [
        (
            out,
            row["status"],
            f"{row['samples']:,}/{row['total']:,}",
            f"{row['shards']:,}/{row['units']:,}",
            format_bytes(row["bytes"]),
        )
        for out, row in rows.items()
    ]
    totals = {
        name: sum(row[name] for row in rows.values())
        for name in ("samples", "shards", "bytes", "healthy", "working", "lost")
    }
    cells = (f"{totals['samples']:,}", f"{totals['shards']:,}", format_bytes(totals["bytes"]))
    print_table(HEADINGS, [*table, ("TOTALS", "", *cells)])
    for out, status in rows.items():
        for reason in status["damaged"]:
            click.echo(f"{reason}; run `tpu extract repair {out}`")
    click.echo(
        format_health(healthy=totals["healthy"], working=totals["working"], lost=totals["lost"])
    )


def show_sample(dataset: Dataset, sample: int, *, as_json: bool) -> None:
    metadata = dict(dataset.metadata(sample))
    sites: dict[str, dict[str, Any]] = {}
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
        print_json({**metadata, "token_ids": tokens, "sites": sites})
        return
    for name, value in {**metadata, "token_ids": tokens}.items():
        text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else repr(value)
        click.echo(f"{name:>14}  {text if len(text) <= 100 else text[:99] + '…'}")
    for name, summary in sites.items():
        shape = " × ".join(map(str, summary["shape"]))
        statistics = (
            ""
            if summary["mean"] is None
            else f"  mean {summary['mean']:+.4g}, largest {summary['largest']:.4g}"
        )
        click.echo(f"{name:>14}  {shape} {summary['dtype']}{statistics}")


def show_statistics(dataset: Dataset, *, as_json: bool) -> None:
    from tpufleet_activations.io.site_statistics import site_statistics

    found = {site: site_statistics(dataset, site) for site in dataset.sites}
    if as_json:
        print_json({site: value.to_json() for site, value in found.items()})
        return
    table = []
    for site, value in found.items():
        numbers = ("-" if n is None else f"{n:.4g}" for n in (value.mean, value.norm, value.max))
        table.append((site, f"{value.rows:,}", *numbers, f"{value.nonfinite:,}"))
    print_table(("SITE", "ROWS", "MEAN", "NORM", "MAX", "NON-FINITE"), table)
    if not dataset.complete:
        click.echo(f"{len(dataset.commits):,} of {dataset.plan.units:,} units", err=True)
    if any(value.nonfinite for value in found.values()):
        click.echo("rows with values that are not finite are left out of MEAN, NORM and MAX")


def show_latents(index: LatentIndex, chosen: Sequence[int], *, as_json: bool) -> None:
    found = {latent: index.strongest(latent) for latent in chosen}
    if as_json:
        print_json(
            {
                str(latent): {"tokens": index.count(latent), "strongest": entries}
                for latent, entries in found.items()
            }
        )
        return
    for latent, entries in found.items():
        click.echo(f"latent {latent}: on {index.count(latent):,} tokens")
        rows = [(f"{e.value:.4g}", str(e.sample), str(e.position)) for e in entries[:LATENT_ROWS]]
        print_table(("VALUE", "SAMPLE", "POSITION"), rows)


def show_report(report: VerificationReport, out: str, *, as_json: bool) -> None:
    if as_json:
        print_json({**asdict(report), "whole": report.intact})
        return
    click.echo(
        f"{report.committed:,} of {format_count(report.units, 'unit')}, "
        f"{format_count(report.samples, 'sample')}, {report.tokens:,} tokens, "
        f"{format_bytes(report.bytes)}"
    )
    show_problems(report)
    for label, names in (
        ("leftover, harmless", report.leftovers),
        ("not committed yet", report.uncommitted),
        ("foreign, kept", report.foreign),
    ):
        for name in names:
            click.echo(f"  {label}: {name}")
    if report.intact and report.leftovers:
        click.echo(f"delete leftovers with {extract_command('verify', '--sweep', out)}")
    damaged, absent = len(report.bad_units), report.units - report.committed
    next_step = extract_command("repair" if damaged else "run", out)
    checksums = "all match" if report.checksums else "not checked"
    click.echo(
        f"OK: every sample stored exactly once; sizes match; checksums: {checksums}"
        if report.intact
        else f"{'FAILED' if damaged else 'INCOMPLETE'}: {damaged:,} damaged units, {absent:,} not "
        f"committed; checksums: {checksums}; continue with {next_step}"
    )


def show_problems(report: VerificationReport) -> None:
    for problem in report.problems:
        click.echo(f"  problem: {problem}")


def _skip_reason(estimate: Mapping[str, Any]) -> str:
    """The most frequent kind of reason for skipped samples, and how many have it."""
    reason = estimate["why_skipped"]
    return f", mostly ({estimate['skipped_most']:,}): {reason[:120]}" if reason else ""


def _stored(estimate: Mapping[str, Any]) -> str:
    stored = estimate.get("stored_tokens")
    return "" if stored in (None, estimate["tokens"]) else f", of which {stored:,} are stored"


def _abbreviate(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} … {names[-1]}"

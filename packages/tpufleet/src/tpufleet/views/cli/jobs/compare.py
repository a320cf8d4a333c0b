"""`tpu compare`: metrics of one job, or how jobs differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import click

from tpufleet.errors import unknown
from tpufleet.model.api_types import Comparison, MetricSeries
from tpufleet.model.job.metric_points import MetricPoint
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option
from tpufleet.views.line_plot import line_plot

MAX_PLOTS = 4  # without --metric


@click.command(
    epilog="\b\nExamples:\n  tpu compare train --metric loss\n"
    "  tpu compare baseline sweep-1 sweep-2\n  tpu compare a b --diff\n"
    "  tpu compare a b --metric loss --metric accuracy\n"
)
@click.argument("jobs", metavar="JOB…", nargs=-1, required=True)
@click.option("--diff", is_flag=True, help="Print the differing lines of the code.")
@output.repeatable(
    "--metric", "-m", metavar="NAME", help="Plot this metric (default: the first 4)."
)
@json_option
def compare(jobs: tuple[str, ...], diff: bool, metric: tuple[str, ...]) -> None:
    """Compare JOBs: settings that differ, code that differs from the first job, metrics, curves.

    Of one JOB, show its metrics as curves over its steps; they stay after its end. A program
    reports metrics with `tpufleet.runtime.progress`, or the `metrics` field of the job reads them
    from its output.
    """
    if len(jobs) == 1:
        _show_metrics(jobs[0], metric)
        return
    with connection.connect() as client:
        comparison = client.compare(jobs)
        series = [client.metrics(row.id) for row in comparison.jobs]
    if output.printed_json({"comparison": comparison, "series": series}):
        return
    output.print_table(*comparison_table(comparison), "")
    for line in code_lines(comparison, diff):
        output.print_line(line)
    if not diff and any(code.files for code in comparison.code):
        output.print_status("  next: --diff prints the lines")
    for line in plot_lines(series, metric):
        output.print_line(line)


def _show_metrics(job: str, metric: tuple[str, ...]) -> None:
    with connection.connect() as client:
        series = client.metrics(job)
    if output.printed_json(series):
        return
    if not any(point.values for point in series.points):
        output.print_status(
            f"{series.name} has reported no metrics\n"
            "  next: call `tpufleet.runtime.progress(step, loss=loss)`, or submit it with "
            r"--metric 'loss=loss: ([\w.+-]+)'"
        )
        return
    for line in plot_lines([series], metric):
        output.print_line(line)


def comparison_table(comparison: Comparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Titles and rows: settings that differ, then metrics."""
    titles = ("", *(row.name for row in comparison.jobs))
    lines: list[tuple[str, ...]] = [
        ("job", *(row.id for row in comparison.jobs)),
        ("owner", *(row.owner for row in comparison.jobs)),
        ("state", *(row.state.value for row in comparison.jobs)),
        ("tags", *(", ".join(row.tags) or "-" for row in comparison.jobs)),
    ]
    lines += [(name, *(_cell(value) for value in row)) for name, row in comparison.config.items()]
    lines += [
        (name, *("-" if value is None else f"{value:.6g}" for value in row))
        for name, row in comparison.metrics.items()
    ]
    return titles, lines


def _cell(value: str | None) -> str:
    return "-" if value is None else text.one_line(value) or '""'


def code_lines(comparison: Comparison, diff: bool) -> Iterator[str]:
    """How the code of each job differs from that of the first one."""
    names = Counter(row.name for row in comparison.jobs)
    first, *others = (row.id if names[row.name] > 1 else row.name for row in comparison.jobs)
    for name, code in zip(others, comparison.code, strict=True):
        yield ""
        if code.message and not code.files:
            yield f"code of {name}: cannot be compared: {text.one_line(code.message)}"
        elif code.same:
            yield f"code of {name}: same as {first}"
        else:
            count = text.counted(len(code.files), "file")
            differ = "differs" if len(code.files) == 1 else "differ"
            yield f"code of {name}: {count} {differ} from {first}"
            for file in code.files:
                yield f"  {file.change:<8} {text.one_line(file.path)}"
                if diff:
                    shown = file.diff or "empty, binary, or too large to show"
                    for line in shown.splitlines():
                        yield f"    {text.without_control_characters(line)}"
            if code.message:
                yield f"  {text.one_line(code.message)}"


def plot_lines(series: Sequence[MetricSeries], wanted: Sequence[str] = ()) -> Iterator[str]:
    """Curves of the wanted metrics, or of the first ones."""
    known = list(
        dict.fromkeys(name for each in series for point in each.points for name in point.values)
    )
    for name in wanted:
        if name not in known:
            raise unknown("metric", name, known)
    for name in wanted or known[:MAX_PLOTS]:
        yield ""
        curves = {f"{each.name} ({each.job_id[:4]})": _curve(each.points, name) for each in series}
        for line in line_plot(text.one_line(name), curves, width=64):
            yield text.without_control_characters(line)
    if not wanted and len(known) > MAX_PLOTS:
        rest = ", ".join(known[MAX_PLOTS:])
        yield ""
        yield f"more metrics: {text.one_line(rest)}; pass --metric NAME"


def _curve(points: Sequence[MetricPoint], name: str) -> list[tuple[float, float]]:
    """Over steps; over seconds since the first report when there are no steps."""
    steps = all(point.step is not None for point in points)
    start = points[0].at if points else None
    return [
        (
            float(point.step or 0) if steps else (point.at - start).total_seconds(),
            point.values[name],
        )
        for point in points
        if start is not None and name in point.values
    ]

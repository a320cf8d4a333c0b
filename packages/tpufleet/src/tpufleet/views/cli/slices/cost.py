"""`tpu cost`: chip hours, cost and budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

import click

from tpufleet.model.people.budgets import BudgetPeriod, BudgetUse
from tpufleet.model.people.costs import Badput, CostRow
from tpufleet.model.tpu import prices
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import example, json_option
from tpufleet.views.cli.parameter_types import PastMoment

GROUPINGS: dict[str, Callable[[CostRow], str]] = {
    "job": lambda row: (
        f"{row.job_id} ({row.job_name})"
        if row.job_id
        else f"(earlier jobs of {row.owner})"
        if row.owner
        else "(no job)"
    ),
    "user": lambda row: row.owner or "(no user)",
    "pool": lambda row: row.pool or "(no pool)",
    "type": lambda row: f"{short_name(row.accelerator)} {row.capacity}",
}


@dataclass(slots=True)
class CostTotal:
    label: str
    chip_hours: float = 0.0
    useful: float = 0.0
    badput: dict[Badput, float] = field(default_factory=dict)  # chip hours
    usd: float = 0.0
    simulated_usd: float = 0.0  # what simulated slices would have cost; not part of `usd`
    badput_usd: dict[Badput, float] = field(default_factory=dict)  # of both
    priced: bool = True  # False: part of it has no known price


@click.command(
    cls=output.CommandGroup,
    epilog="\b\nExamples:\n  tpu cost\n  tpu cost --by user --since 30d\n"
    "  tpu cost --since 2026-05-01 --json\n  tpu cost --prices\n  tpu cost project\n"
    "  tpu cost budget\n",
)
@click.option("--by", type=click.Choice(list(GROUPINGS)), default="job", show_default=True)
@click.option(
    "--since",
    type=PastMoment(),
    help="Only what was billed since then: a date such as 2026-05-01 (UTC), or 30d ago.",
)
@click.option("--prices", "show_prices", is_flag=True, help="Show the price table instead.")
@json_option
def cost(by: str, since: datetime | None, show_prices: bool) -> None:
    """Show chip hours and dollars by job, user, pool or type: how much of it were steps that count,
    and what the rest went into: recovery from faults, steps made again, start of the program,
    connecting, restoring and saving checkpoints, idle (booting, setup, waiting in a pool). Unknown:
    attempts that did not finish and reported no steps. Slices of a pool that no job held are
    `(no job)` and `(no user)`. --json has the classes by the names of Google's library
    ml-goodput-measurement.

    Without --since, jobs of earlier months than the last one are summed by user.

    Prices are estimates; `prices` in the config file overrides them. Simulated slices are
    priced like real ones and marked as simulated; nothing is billed for them.
    """
    table = prices.price_table(connection.settings().prices)
    if show_prices:
        _show_prices(table)
        return
    with connection.connect() as client:
        rows = client.costs(since).rows
    totals: dict[str, CostTotal] = {}
    total = CostTotal("total")
    for row in rows:
        label = GROUPINGS[by](row)
        for item in (totals.setdefault(label, CostTotal(label)), total):
            _add(item, row, table)
    ordered = sorted(
        totals.values(), key=lambda item: (-item.usd, -item.simulated_usd, -item.chip_hours)
    )
    shown = [*ordered, total] if len(ordered) > 1 else ordered
    output.print_table(
        (by.upper(), "CHIP HOURS", "USEFUL", "COST", "NOT USEFUL"),
        (cells(item) for item in shown),
        "no cost yet" if since is None else "nothing was billed since then",
        droppable=("NOT USEFUL",),
        value={"by": by, "rows": ordered, "usd": total.usd},
    )


def _add(item: CostTotal, row: CostRow, table: dict[tuple[str, str], prices.Price]) -> None:
    usd = prices.chip_hour_price(row.accelerator, row.capacity, table)
    item.chip_hours += row.chip_hours
    item.useful += row.useful
    for kind, hours in row.badput.items():
        item.badput[kind] = item.badput.get(kind, 0.0) + hours
        item.badput_usd[kind] = item.badput_usd.get(kind, 0.0) + hours * (usd or 0.0)
    if row.simulated:
        item.simulated_usd += row.chip_hours * (usd or 0.0)
    else:
        item.usd += row.chip_hours * (usd or 0.0)
    item.priced &= usd is not None


def cells(item: CostTotal) -> tuple[str, ...]:
    dollars = _dollars(item.usd, item.simulated_usd)
    share = f" ({item.useful / item.chip_hours:.0%})" if item.chip_hours else ""
    useful = f"{prices.amount(item.useful)}{share}"
    unknown = item.badput.get(Badput.UNKNOWN, 0.0) > item.chip_hours / 2
    return (
        item.label,
        prices.amount(item.chip_hours),
        "not known" if unknown else useful,
        dollars + ("" if item.priced else " + unpriced"),
        _losses(item),
    )


def _losses(item: CostTotal) -> str:
    """What cost most comes first; less than a hundredth of all is left out."""
    largest = sorted(item.badput, key=lambda kind: (-item.badput_usd[kind], -item.badput[kind]))
    return ", ".join(
        f"{text.BADPUT[kind]} ${prices.amount(item.badput_usd[kind])}"
        for kind in largest
        if item.badput[kind] >= item.chip_hours / 100
    )


def _dollars(usd: float, simulated_usd: float) -> str:
    real = f"${prices.amount(usd)}" if usd or not simulated_usd else ""
    simulated = f"${prices.amount(simulated_usd)} simulated" if simulated_usd else ""
    return " + ".join(part for part in (real, simulated) if part)


def _show_prices(table: dict[tuple[str, str], prices.Price]) -> None:
    rows = list(table.values())
    output.print_table(
        ("GENERATION", "CAPACITY", "USD/CHIP HOUR", "AS OF", "SOURCE"),
        (
            (row.generation, row.capacity.value, f"${row.usd:.4g}", row.as_of or "-", row.source)
            for row in rows
        ),
        value={"prices": rows},
    )


@cost.command(epilog=example("tpu cost project"))
@json_option
def project() -> None:
    """List what the cloud project of the config file contains and pays for: TPU VMs, queued
    resources, VMs, groups, GKE clusters, disks and addresses of all owners. Needs no server.

    Orphaned: of a server that no longer exists, so nothing deletes it; NEXT is the command that
    deletes it. Prices are estimates, without storage, network traffic and discounts.
    """
    from tpufleet.compose.providers import project_resources

    found = project_resources(connection.settings(), output.print_status).all()
    found.sort(key=lambda each: (-(each.usd_per_hour or 0.0), each.kind, each.name))
    total = sum(each.usd_per_hour or 0.0 for each in found)
    output.print_table(
        ("KIND", "NAME", "ZONE", "TYPE", "STATE", "BELONGS TO", "USD/HOUR", "NEXT"),
        (
            (each.kind, each.name, each.location, each.type, each.state.lower() or "-",
             each.belongs.value, _hourly(each.usd_per_hour), each.next or "-")
            for each in found
        ),
        "the project contains nothing that is paid for",
        droppable=("STATE", "TYPE"),
        value={"resources": found, "usd_per_hour": total},
    )  # fmt: skip
    if found and not output.as_json():
        click.echo(f"\nabout ${total:,.2f} per hour, ${total * 24:,.2f} per day")


def _hourly(usd: float | None) -> str:
    return "unknown" if usd is None else f"${prices.amount(usd)}"


@cost.command(epilog=example("tpu cost budget"))
@json_option
def budget() -> None:
    """Show what users and pools have spent of their budgets.

    Budgets are set as `budgets` in the config file of the server; docs/server-reference.md has the
    syntax. At 80 % and 100 % an event is recorded; at 100 % running jobs are stopped, and
    queued ones wait for the next period.
    """
    with connection.connect() as client:
        report = client.budgets()
    output.print_table(
        ("SCOPE", "NAME", "SPENT", "BUDGET", "USED", "PERIOD"),
        (
            (use.scope.value, use.name, f"${prices.amount(use.spent)}",
             f"${prices.amount(use.usd)}", f"{use.share:.0%}", _period(use))
            for use in sorted(report.budgets, key=lambda use: -use.share)
        ),
        "no budgets; set `budgets` in the server's config file",
        value={"budgets": report.budgets, "now": report.now},
    )  # fmt: skip


def _period(use: BudgetUse) -> str:
    if use.period is BudgetPeriod.TOTAL or use.since is None:
        return "total"
    return f"{use.period} since {use.since:%Y-%m-%d}"

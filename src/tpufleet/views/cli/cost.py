"""`tpu cost` and `tpu stock`: what was paid for, and what could be had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

import click

from tpufleet.model import prices
from tpufleet.model.costs import CostRow
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option

BY: dict[str, Callable[[CostRow], str]] = {
    "job": lambda row: f"{row.job_id} ({row.job_name})" if row.job_id else "(nobody)",
    "user": lambda row: row.owner or "(nobody)",
    "pool": lambda row: row.pool or "(no pool)",
    "type": lambda row: f"{row.accelerator} {row.capacity}",
}


@dataclass(slots=True)
class CostTotal:
    what: str
    chip_hours: float = 0.0
    useful: float = 0.0
    lost: float = 0.0
    usd: float = 0.0
    lost_usd: float = 0.0
    priced: bool = True  # False: part of it has no known price


@click.command(
    short_help="What was paid for, and what was lost.",
    epilog="\b\nExamples:\n  tpu cost\n  tpu cost --by user --json\n  tpu cost --prices\n",
)
@click.option("--by", type=click.Choice(list(BY)), default="job", show_default=True)
@click.option("--prices", "show_prices", is_flag=True, help="Show the price table instead.")
@json_option
def cost(by: str, show_prices: bool, as_json: bool) -> None:
    """Chip hours and dollars by job, user, pool or type; and how much of it was work that a lost
    slice made us do again, as far as jobs report their steps.

    Prices are estimates; `prices` in the config file wins over them. Simulated slices are priced
    like real ones: what a rehearsal would have cost.
    """
    table = prices.price_table(connection.settings().prices)
    if show_prices:
        _show_prices(table, as_json)
        return
    with connection.connect() as client:
        rows = client.costs().rows
    sums: dict[str, CostTotal] = {}
    for row in rows:
        _add(sums.setdefault(BY[by](row), CostTotal(BY[by](row))), row, table)
    ordered = sorted(sums.values(), key=lambda spent: (-spent.usd, -spent.chip_hours))
    if as_json:
        output.print_json({"by": by, "rows": ordered, "usd": sum(item.usd for item in ordered)})
        return
    shown = [*ordered, total(ordered)] if len(ordered) > 1 else ordered
    output.print_table(
        (by.upper(), "CHIP HOURS", "USEFUL", "LOST", "COST", "OF IT LOST"),
        (cells(spent) for spent in shown),
        "nothing was paid for yet",
    )


@click.command(
    short_help="What was granted and refused, where and when.",
    epilog="\b\nExample:\n  tpu stock --zone us-central1-a\n",
)
@click.option("--zone", help="Only this zone.")
@click.option("--type", "accelerator", help="Only this type, as `tpu types` spells it.")
@json_option
def stock(zone: str | None, accelerator: str | None, as_json: bool) -> None:
    """What each zone gave and refused, when, and when it will be asked again."""
    with connection.connect() as client:
        report = client.stock()
    rows = [
        row
        for row in report.rows
        if zone in (None, row.zone) and accelerator in (None, row.accelerator)
    ]
    if as_json:
        output.print_json({"rows": rows})
        return
    output.print_table(
        ("ZONE", "TYPE", "CAPACITY", "GRANTED", "LAST", "REFUSED", "LAST", "AGAIN", "PREEMPTED",
         "WORDS"),
        (
            (row.zone, row.accelerator, row.capacity.value, str(row.granted),
             text.age(row.last_granted, report.now), str(row.refused),
             text.age(row.last_refused, report.now), retry_time(row.not_before, report.now),
             str(row.preempted), row.message)
            for row in rows
        ),
        "nothing was asked for yet",
    )  # fmt: skip


def _add(spent: CostTotal, row: CostRow, table: dict[tuple[str, str], prices.Price]) -> None:
    usd = prices.chip_hour_price(row.accelerator, row.capacity, table)
    spent.chip_hours += row.chip_hours
    spent.useful += row.useful
    spent.lost += row.lost
    spent.usd += row.chip_hours * (usd or 0.0)
    spent.lost_usd += row.lost * (usd or 0.0)
    spent.priced &= usd is not None


def retry_time(not_before: datetime | None, now: datetime) -> str:
    """When a zone that refused is asked again. A moment that has passed: with the next job."""
    if not_before is None:
        return "-"
    return "now" if not_before <= now else text.age(not_before, now)


def total(rows: Sequence[CostTotal]) -> CostTotal:
    return CostTotal(
        "total",
        chip_hours=sum(row.chip_hours for row in rows),
        useful=sum(row.useful for row in rows),
        lost=sum(row.lost for row in rows),
        usd=sum(row.usd for row in rows),
        lost_usd=sum(row.lost_usd for row in rows),
        priced=all(row.priced for row in rows),
    )


def cells(spent: CostTotal) -> tuple[str, ...]:
    share = f" ({spent.useful / spent.chip_hours:.0%})" if spent.chip_hours else ""
    return (
        spent.what,
        f"{spent.chip_hours:.2f}",
        f"{spent.useful:.2f}{share}",
        f"{spent.lost:.2f}",
        f"${spent.usd:,.2f}" + ("" if spent.priced else " and more"),
        f"${spent.lost_usd:,.2f}",
    )


def _show_prices(table: dict[tuple[str, str], prices.Price], as_json: bool) -> None:
    rows = list(table.values())
    if as_json:
        output.print_json({"prices": rows})
        return
    output.print_table(
        ("GENERATION", "CAPACITY", "A CHIP HOUR", "AS OF", "SOURCE"),
        (
            (row.generation, row.capacity.value, f"${row.usd:.4g}", row.as_of or "-", row.source)
            for row in rows
        ),
        "no prices",
    )

"""`tpu inventory`: slices, room in pools, and what people wrote about them."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime

import click

from tpufleet.errors import BadInput
from tpufleet.model.fleet.inventory import Inventory, InventoryChange, InventoryRow, InventoryState
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import type_lookup
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet.model.values.names import zone_error
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import Cell, example, json_option

TITLES = (
    "ALIAS", "NAME", "TYPE", "ZONE", "STATE", "OWNER", "JOB", "BELONGS TO", "SINCE", "CHECKED",
    "NOTE",
)  # fmt: skip
# On a narrow terminal these columns are left out, the first one first.
DROPPED_FIRST = ("CHECKED", "BELONGS TO", "SINCE", "ALIAS", "NOTE", "JOB")
# A generation, that one and later ones, or all.
GENERATION = re.compile(r"v[2-9](e|p|litepod)?\+?|v\*|all|-a")
TYPE_NAME = r"v[2-9](?:e|p|litepod)?-\d+"
FREE_STATES = frozenset({InventoryState.FREE, InventoryState.AVAILABLE})


@click.command(
    cls=output.CommandGroup,
    epilog="\b\nExamples:\n  tpu inventory\n  tpu inventory v4 free\n"
    "  tpu inventory v4+ on-demand us-east5-a\n  tpu inventory --csv > tpus.csv\n"
    "  tpu inventory set tpf-lab-1a2b3c4d --alias big --note 'for the demo'\n",
)
@click.argument("words", metavar="[WORD]…", nargs=-1)
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
@json_option
def inventory(words: tuple[str, ...], as_csv: bool) -> None:
    """List slices and room in pools: state, owner, job and last heartbeat are observed; alias, note
    and belongs-to are what people wrote.

    A WORD selects: a TPU type (v4-32), a generation (v4), that one and later ones (v4+), the name
    or alias of a slice, `free`, a capacity type (spot, on-demand), or a zone.
    """
    with connection.connect() as client:
        known = client.inventory()
    if words:
        known = replace(known, rows=tuple(select(known.rows, words)), chips=())
    if output.as_json():
        output.print_json(known)
    elif as_csv:
        write_csv(known)
    else:
        show(known.rows)
        _show_chips(known)


def select(rows: Sequence[InventoryRow], words: Iterable[str]) -> Iterator[InventoryRow]:
    """Rows that each kind of word matches: one of the types and names, one of the zones, …"""
    names: set[str] = set()
    types: list[re.Pattern[str]] = []
    zones: set[str] = set()
    capacity: set[str] = set()
    free = False
    for word in words:
        if word == "free":
            free = True
        elif word in {*Capacity}:
            capacity.add(word)
        elif found := named_slices(rows, word):
            names |= {row.id for row in found}
        elif any(word in row.zone.split(", ") for row in rows) or zone_error(word) is None:
            zones.add(word)
        else:
            types.append(generation_pattern(word))
    for row in rows:
        if (
            (
                not (names or types)
                or row.id in names
                or any(each.fullmatch(row.accelerator) for each in types)
            )
            and (not free or row.state in FREE_STATES)
            and (not capacity or row.capacity in capacity)
            and (not zones or zones & {*row.zone.split(", ")})
        ):
            yield row


def show(rows: Sequence[InventoryRow]) -> None:
    empty = "no slices or pools; `tpu run TYPE -- CMD` requests one"
    output.print_table(TITLES, (_cells(row) for row in rows), empty, droppable=DROPPED_FIRST)


def _cells(row: InventoryRow) -> list[Cell]:
    kind = short_name(row.accelerator)
    kind = kind if row.count == 1 else f"{row.count}×{kind}"
    name = f"pool {row.id}" if row.state is InventoryState.AVAILABLE else row.id
    return [
        row.alias or "-", name, kind, row.zone or "-",
        (row.state.value, text.colour(row.state)), row.owner or "-", row.job_name or "-",
        row.belongs_to or "-", text.age(row.since), text.age(row.last_check),
        text.one_line(row.note),
    ]  # fmt: skip


def _show_chips(known: Inventory) -> None:
    if known.chips:
        counts = ", ".join(
            f"{each.chips} {short_name(each.accelerator)} in {each.zone}" for each in known.chips
        )
        click.echo(f"\nchips: {counts}")


def write_csv(known: Inventory) -> None:
    """Times are in ISO 8601."""
    names = list(InventoryRow.__dataclass_fields__)
    writer = csv.writer(sys.stdout)
    writer.writerow(names)
    writer.writerows([_csv_cell(getattr(row, name)) for name in names] for row in known.rows)


def _csv_cell(value: object) -> str:
    """A spreadsheet would run what looks like a formula."""
    plain = (
        value.isoformat() if isinstance(value, datetime) else str("" if value is None else value)
    )
    shown = text.without_control_characters(plain)
    return f"'{shown}" if shown[:1] in ("=", "+", "-", "@") and len(shown) > 1 else shown


@inventory.command(
    "set", epilog="\b\nExample:\n  tpu inventory set tpf-lab-1a2b3c4d --alias demo\n"
)
@click.argument("name")
@click.option("--alias", help="Short name; empty text removes it.")
@click.option("--note", help="Free text.")
@click.option("--belongs-to", help="Person or group.")
@json_option
def set_(name: str, alias: str | None, note: str | None, belongs_to: str | None) -> None:
    """Change what people wrote about the slice, pool or alias NAME."""
    output.require_any({"--alias": alias, "--note": note, "--belongs-to": belongs_to})
    change = InventoryChange(alias=alias, note=note, belongs_to=belongs_to)
    with connection.connect() as client:
        written = client.annotate(name, change)
    output.print_result(written, f"changed {written.id}")


@inventory.command(epilog=example("tpu inventory slices --json"))
@json_option
def slices() -> None:
    """List every slice that exists or is requested, and its job."""
    with connection.connect() as client:
        rows = client.slices()
    output.print_table(
        ("SLICE", "STATE", "TYPE", "ZONE", "CAPACITY", "HOSTS", "POOL", "JOB", "REQUESTED",
         "REASON"),
        (
            (row.id, (row.state.value, text.colour(row.state)), short_name(row.accelerator),
             row.zone, row.capacity.value, f"{row.hosts_seen}/{row.hosts}", row.pool or "-",
             row.job_id or "-", text.age(row.requested_at), row.reason)
            for row in rows
        ),
        output.none_yet("slices", "tpu run TYPE -- CMD"),
        droppable=("REQUESTED", "CAPACITY", "HOSTS", "POOL", "JOB"),
        value={"slices": rows},
    )  # fmt: skip


def named_slices(rows: Sequence[InventoryRow], name: str) -> list[InventoryRow]:
    """Slices of this id, alias or node. The prefix of a node may be left out before its type:
    `v4-32-spot-1` is lab-v4-32-spot-1."""
    slices = [row for row in rows if row.state is not InventoryState.AVAILABLE]
    found = [row for row in slices if name in (row.id, row.alias, row.node)]
    if found or not re.match(rf"{TYPE_NAME}-", name):
        return found
    found = [row for row in slices if row.node.endswith(f"-{name}")]
    nodes = sorted({row.node for row in found})
    if len(nodes) > 1:
        raise BadInput(f"{name} is the end of several names: {', '.join(nodes)}; write one of them")
    return found


def generation_pattern(written: str) -> re.Pattern[str]:
    """`v5e` → v5litepod of any size; `v4+` → v4 and later; `v*` → all."""
    if written in ("v*", "all", "-a"):
        return re.compile(".*")
    if generation := re.fullmatch(r"v([2-9])(e|p|litepod)?(\+?)", written):
        if generation[3]:
            later = "|".join(str(number) for number in range(int(generation[1]), 10))
            return re.compile(rf"v({later})(e|p|litepod)?-.*")
        suffix = {"e": "(e|litepod)", "litepod": "(e|litepod)", "p": "p"}.get(
            generation[2] or "", "(e|p|litepod)?"
        )
        return re.compile(rf"v{generation[1]}{suffix}-.*")
    return re.compile(re.escape(type_lookup.find(written).name))

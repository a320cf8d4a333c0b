"""`tpu types`: the TPU types, and which zones granted them."""

from __future__ import annotations

from datetime import datetime

import click

from tpufleet.errors import unknown
from tpufleet.model.tpu import tpu_zones, type_lookup
from tpufleet.model.tpu.tpu_zones import ZoneOffer
from tpufleet.model.tpu.type_lookup import Accelerator, short_name
from tpufleet.model.values.names import zone_error
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import example, json_option


@click.command(
    cls=output.CommandGroup,
    epilog="\b\nExamples:\n  tpu types v5e\n  tpu types --zones v6e-8\n"
    "  tpu types us-east5-b\n  tpu types stock v5e-16\n",
)
@click.argument("name", metavar="[TYPE|ZONE]", required=False)
@click.option("--zones", "by_zone", is_flag=True, help="List the zones that offer each type.")
@json_option
def types(name: str | None, by_zone: bool) -> None:
    """List TPU types, their chips and hosts; optionally of one TYPE or generation (v4, v5e, …), or
    what a ZONE offers.

    --zones lists where Google documents each type, and which capacity types may be requested there;
    `tpu types stock` shows what zones granted. Needs no server.
    """
    zone = name if zone_error(name) is None else None
    chosen = _select(None if zone else name)
    if by_zone or zone is not None:
        _print_zones(chosen, zone)
        return
    if output.printed_json({"types": chosen}):
        return
    aliases: dict[str, list[str]] = {}
    for spelling, known in type_lookup.spellings().items():
        if spelling != known:
            aliases.setdefault(known, []).append(spelling)
    output.print_table(
        ("TYPE", "ALIAS", "CHIPS", "HOSTS", "CHIPS/HOST", "TOPOLOGY", "GKE MACHINE"),
        (
            (kind.name, ", ".join(aliases.get(kind.name, [])) or "-", str(kind.chips),
             str(kind.hosts), str(kind.chips_per_host), kind.topology, kind.machine_type or "-")
            for kind in chosen
        ),
    )  # fmt: skip


def _select(name: str | None) -> list[Accelerator]:
    every = type_lookup.all_types().values()
    if name is None:
        return list(every)
    wanted = name.lower()
    chosen = [kind for kind in every if wanted in (kind.generation, kind.name.split("-")[0])]
    if not chosen and "-" in wanted:
        return [type_lookup.find(wanted)]
    if not chosen:
        raise unknown("TPU type or generation", name, sorted({kind.generation for kind in every}))
    return chosen


def _print_zones(chosen: list[Accelerator], zone: str | None) -> None:
    names = {kind.name for kind in chosen}
    offers = [
        offer
        for offer in tpu_zones.offers()
        if offer.accelerator in names and zone in (None, offer.zone)
    ]
    if output.printed_json(
        {"offers": offers, "as_of": tpu_zones.AS_OF, "source": tpu_zones.SOURCE}
    ):
        return
    rows = []
    for of_zone in _grouped(offers):
        first = of_zone[0]
        capacity = ", ".join(kind.value for kind in first.capacity)
        rows.append((_range(of_zone), first.zone, first.access.value, capacity))
    output.print_table(
        ("TYPE", "ZONE", "ACCESS", "CAPACITY"), rows, f"no TPU type is documented in {zone}"
    )
    click.echo(f"Offered, not necessarily in stock. As of {tpu_zones.AS_OF}: {tpu_zones.SOURCE}")


def _grouped(offers: list[ZoneOffer]) -> list[list[ZoneOffer]]:
    """By generation and zone: all sizes of a generation usually share their zones."""
    groups: dict[tuple[str, str], list[ZoneOffer]] = {}
    for offer in offers:
        generation = type_lookup.find(offer.accelerator).generation
        groups.setdefault((generation, offer.zone), []).append(offer)
    return list(groups.values())


def _range(offers: list[ZoneOffer]) -> str:
    first, last = (type_lookup.short_name(offers[index].accelerator) for index in (0, -1))
    return first if len(offers) == 1 else f"{first} … {last}"


@types.command(epilog=example("tpu types stock v5e-16 us-west4-a"))
@click.argument("words", metavar="[TYPE] [ZONE]", nargs=-1)
@json_option
def stock(words: tuple[str, ...]) -> None:
    """Show what each zone granted and refused, and when it is retried."""
    zones = {word for word in words if zone_error(word) is None}
    names = {type_lookup.find(word).name for word in words if word not in zones}
    with connection.connect() as client:
        report = client.stock()
    rows = [
        row
        for row in report.rows
        if (not zones or row.zone in zones) and (not names or row.accelerator in names)
    ]
    output.print_table(
        ("ZONE", "TYPE", "CAPACITY", "GRANTED", "LAST", "REFUSED", "LAST", "RETRY", "PREEMPTED",
         "MESSAGE"),
        (
            (row.zone, short_name(row.accelerator), row.capacity.value, str(row.granted),
             text.age(row.last_granted, report.now), str(row.refused),
             text.age(row.last_refused, report.now), retry_time(row.not_before, report.now),
             str(row.preempted), row.message)
            for row in rows
        ),
        "no capacity requested yet",
        value={"rows": rows},
    )  # fmt: skip


def retry_time(not_before: datetime | None, now: datetime) -> str:
    """When a location that refused is retried. A time that has passed: with the next job."""
    if not_before is None:
        return "-"
    return "now" if not_before <= now else text.age(not_before, now)

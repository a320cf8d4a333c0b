"""`tpu reserve`: reservations of slices, and holds on slices."""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime, timedelta

import click

from tpufleet.errors import BadInput, NotFound, invalid
from tpufleet.model.api_types import NewReservation
from tpufleet.model.fleet.reservations import Reservation
from tpufleet.model.people.preferences import find_zone
from tpufleet.model.values import durations
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import Cell, example, json_option
from tpufleet.views.cli.parameter_types import Duration
from tpufleet.views.cli.settings.preferences import use_time_zone

for_option = click.option("--for", "span", type=Duration(), default="30m", show_default=True)


def start_time(written: str, now: datetime) -> datetime:
    """`14:00` (today, or tomorrow if that has passed), `2026-01-31 14:00`, or `2h` from now."""
    if clock := re.fullmatch(r"([01]?[0-9]|2[0-3]):([0-5][0-9])", written):
        start = now.replace(hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0)
        return start if start > now else start + timedelta(days=1)
    try:
        moment = datetime.fromisoformat(written)
        return moment if moment.tzinfo else moment.replace(tzinfo=now.tzinfo)
    except ValueError:
        pass
    try:
        return now + (durations.parse(written) or timedelta(0))
    except BadInput as error:
        example = "14:00, '2026-01-31 14:00' or 2h"
        raise invalid(written, "a time", example, "--from") from error


@click.command(
    cls=output.CommandGroup,
    epilog="\b\nExamples:\n  tpu reserve lab --for 2h --note demo\n"
    "  tpu reserve lab --from 14:00 --for 90m --slices 2\n  tpu reserve list\n"
    "  tpu reserve end 3f9a\n",
)
@click.argument("pool")
@for_option
@click.option("--from", "start", metavar="TIME", help="14:00, a date and time, or 2h (from now).")
@click.option("--slices", type=int, metavar="N", help="How many (default: all of the pool).")
@click.option("--note", default="", help="What for; others see it.")
@json_option
def reserve(pool: str, span: timedelta, start: str | None, slices: int | None, note: str) -> None:
    """Reserve slices of POOL: until the end, only your jobs are placed on them.

    Jobs that run already are not stopped. Before a reservation begins, jobs of others start only if
    their time limit ends before it; a job without a time limit counts as one hour.
    """
    with connection.connect() as client:
        zone = find_zone(str(client.preferences().setting("time_zone")))
        starts_at = None if start is None else start_time(start, datetime.now(UTC).astimezone(zone))
        new = NewReservation(
            id=secrets.token_hex(4),
            pool=pool,
            slices=slices,
            starts_at=starts_at,
            duration=span,
            note=note,
        )
        made = client.reserve(new)
        use_time_zone(client)
    message = (
        f"reserved {text.counted(made.slices, 'slice')} of {made.pool} as {made.id}, "
        f"{text.local_time(made.starts_at)} to {text.local_time(made.ends_at)}"
    )
    output.print_result(made, message)


@reserve.command("list", epilog=example("tpu reserve list --all"))
@click.option("--all", "ended", is_flag=True, help="Ended ones too.")
@json_option
def list_reservations(ended: bool) -> None:
    """List reservations: active and coming ones, and slices held after a failure."""
    with connection.connect() as client:
        known = client.reservations(ended=ended)
        held = [row for row in client.slices() if row.reserved_for is not None]
        use_time_zone(client)
    now = datetime.now(UTC)
    rows = [_cells(each, now) for each in known]
    rows += [
        [row.id, row.pool or "-", "1", row.reserved_for or "", "reserved(error)", "-",
         text.local_time(row.reserved_until) if row.reserved_until else "-",
         row.reason]
        for row in held
    ]  # fmt: skip
    output.print_table(
        ("ID", "POOL", "SLICES", "OWNER", "STATE", "FROM", "UNTIL", "NOTE"), rows,
        droppable=("SLICES", "POOL", "FROM"), whole=("ID",),
        value={"reservations": known, "held": held},
    )  # fmt: skip


def _cells(each: Reservation, now: datetime) -> list[Cell]:
    state = "active" if each.active(now) else "ended" if each.ends_at <= now else "coming"
    note = each.note
    if each.ended_by:
        reason = f": {each.end_reason}" if each.end_reason else ""
        note = f"{note} (ended by {each.ended_by}{reason})".strip()
    return [
        each.id, each.pool, str(each.slices), each.owner, state,
        text.local_time(each.starts_at), text.local_time(each.ends_at), text.one_line(note),
    ]  # fmt: skip


@reserve.command(epilog=example("tpu reserve extend 3f9a --for 1h"))
@click.argument("reservation")
@for_option
@json_option
def extend(reservation: str, span: timedelta) -> None:
    """Let RESERVATION end later."""
    with connection.connect() as client:
        extended = client.extend_reservation(reservation, span)
        use_time_zone(client)
    message = f"{extended.id} now ends {text.local_time(extended.ends_at)}"
    output.print_result(extended, message)


@reserve.command(epilog=example("tpu reserve end 3f9a --reason 'pool is needed'"))
@click.argument("name", metavar="RESERVATION|SLICE")
@click.option(
    "--reason", default="", help="Why an admin ends what another user holds; shown, and audited."
)
@json_option
def end(name: str, reason: str) -> None:
    """End a RESERVATION now, or return a SLICE that is held after a failure to its pool.

    What another user holds requires the admin role and a --reason.
    """
    with connection.connect() as client:
        current = {each.id for each in client.reservations()}
        try:
            ended = client.end_reservation(name, reason)
        except NotFound:
            if name not in {row.id for row in client.slices()}:
                raise
            client.release_held_slice(name)
            output.print_result({"released": name}, f"released {name}")
            return
    message = f"released {ended.id}"
    if ended.id not in current:
        message = f"{ended.id} has already ended, at {text.local_time(ended.ends_at)}"
    output.print_result(ended, message)

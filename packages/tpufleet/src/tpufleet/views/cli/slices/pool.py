"""`tpu pool`: pools of slices that users share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import click
from click.core import ParameterSource

from tpufleet import schema
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import BadInput
from tpufleet.model.api_types import SliceRow
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.slices import SIMULATED_PROVIDERS, SliceState
from tpufleet.model.job import pod_settings
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.people.users import Role
from tpufleet.model.tpu import prices, type_lookup
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet.model.values import durations
from tpufleet.model.values.names import label_error, zone_error
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import Cell, example, json_option, yes_option
from tpufleet.views.cli.parameter_types import Duration

# What an option can reset: the fields of a pool.
CLEARABLE = {"member": "members", "per-user": "slices_per_user", "zone": "zones", "pod": "pod"}


@click.group(epilog=example("tpu pool create lab v5e-16 --largest 4"))
def pool() -> None:
    """Manage pools: how many slices may exist, and who may use them."""


@pool.command(
    epilog="\b\nExamples:\n  tpu pool create lab v5e-16 --largest 4\n"
    "  tpu pool create sim v5e-16 --provider local --largest 2 --smallest 1\n"
    "  tpu pool create lab --largest 8 --clear member\n"
)
@click.argument("name")
@click.argument("accelerator", metavar="[TYPE]", required=False)
@click.option(
    "--provider", default="local", show_default=True, help="local, tpu-vm, compute or gke."
)
@click.option(
    "--largest",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Maximum number of slices.",
)
@click.option(
    "--smallest",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Number of slices kept ready.",
)
@output.repeatable("--zone", "zones", help="Zone; repeatable, in order of preference.")
@output.repeatable(
    "--capacity",
    type=click.Choice([kind.value for kind in Capacity]),
    help="Capacity kind; repeatable, in order of preference (default: spot).",
)
@output.repeatable(
    "--member", "members", help="User who may use it; repeatable (default: all users)."
)
@click.option(
    "--per-user", "slices_per_user", type=click.IntRange(min=1), help="Maximum slices per user."
)
@click.option(
    "--supersede/--no-supersede",
    default=False,
    help="Jobs of higher priority take slices of lower ones.",
)
@click.option(
    "--hold-after-failure",
    "hold_after_failure",
    type=Duration(),
    default="0s",
    show_default=True,
    help="Keep the slices of a failed job for its owner, to look at them.",
)
@click.option(
    "--idle-after",
    type=Duration(),
    default="10m",
    show_default=True,
    help="Release idle slices after this.",
)
@output.repeatable(
    "--pod",
    metavar="NAME=VALUE",
    help="With gke: image, cpu, memory or service_account of the pods; repeatable.",
)
@output.repeatable(
    "--clear",
    type=click.Choice(list(CLEARABLE)),
    help="Reset this setting of an existing pool to its default; repeatable.",
)
@yes_option
@json_option
@click.pass_context
def create(
    context: click.Context,
    name: str,
    accelerator: str | None,
    clear: tuple[str, ...],
    yes: bool,
    **values: Any,
) -> None:
    """Create pool NAME of slices of TYPE, or change one: a TYPE and options that are not given keep
    their values. If no server is configured, one is started on this machine."""
    too_small = "--smallest: must not be larger than --largest"
    known = _is_given(context, "largest")
    errors = [
        *(f"name: {error}" for error in [label_error(name)] if error),
        *(
            f"--clear {option}: not together with --{option}"
            for option in clear
            if _is_given(context, CLEARABLE[option])
        ),
        *(f"--zone: {error}" for error in map(zone_error, values["zones"]) if error),
        *([too_small] if known and values["smallest"] > values["largest"] else []),
    ]
    if errors:
        raise BadInput("\n".join(errors))
    capacity = tuple(Capacity(kind) for kind in values["capacity"]) or (Capacity.SPOT,)
    pod = pod_settings.parse_pod(dict(item.partition("=")[::2] for item in values["pod"]))
    kind = type_lookup.find(accelerator).name if accelerator is not None else ""
    values |= {"accelerator": kind, "capacity": capacity, "pod": pod}
    wanted = Pool(name=name, **values)
    with connection.connect(start=True) as client:
        before = next((each for each in client.pools() if each.name == name), None)
        if before is not None:
            cleared = {CLEARABLE[option] for option in clear}
            kept = [each for each in values if not _is_given(context, each) and each not in cleared]
            wanted = replace(wanted, **{each: getattr(before, each) for each in kept})
        elif accelerator is None:
            raise BadInput(f"TYPE: required, because there is no pool named {name!r} to change")
        if wanted.smallest > wanted.largest:
            raise BadInput(too_small)
        if before is not None and not (yes or output.as_json()):
            _confirm_failing(client, before, wanted)
        saved = client.put_pool(wanted)
    accelerator = accelerator or short_name(saved.accelerator)
    changed = "" if before is None else _changes(before, saved)
    output.print_result(
        saved,
        f"pool {name}: up to {saved.largest} × {accelerator} from {saved.provider}{changed}\n"
        f"  next: tpu run {accelerator} --pool {name} -- CMD",
    )


def _is_given(context: click.Context, parameter: str) -> bool:
    return context.get_parameter_source(parameter) is not ParameterSource.DEFAULT


def _confirm_failing(client: FleetClient, before: Pool, wanted: Pool) -> None:
    """Queued jobs fail when their pool gets another type, or no longer admits their owner."""
    if (before.accelerator, before.members) == (wanted.accelerator, wanted.members):
        return
    queued = list(client.all_jobs(pool=before.name, state="queued,waiting,recovering"))
    if not queued:
        return
    admins = {user.name for user in client.users() if user.role is Role.ADMIN}
    failing = [
        job
        for job in queued
        if job.accelerator != wanted.accelerator
        or not wanted.admits(job.owner, is_admin=job.owner in admins)
    ]
    if failing:
        owners = ", ".join(sorted({job.owner for job in failing}))
        jobs = text.counted(len(failing), "queued job")
        output.print_status(f"this fails {jobs} in pool {before.name} (of {owners})")
        output.confirm(f"Change pool {before.name}?", yes=False)


def _changes(before: Pool, after: Pool) -> str:
    names = [
        each.name
        for each in fields(Pool)
        if getattr(before, each.name) != getattr(after, each.name)
    ]
    return f"; changed: {', '.join(names)}" if names else "; nothing changed"


@pool.command("list", epilog=example("tpu pool list"))
@json_option
def list_pools() -> None:
    """List the pools."""
    with connection.connect() as client:
        pools = client.pools()
    output.print_table(
        ("POOL", "TYPE", "SLICES", "PROVIDER", "ZONES", "CAPACITY", "MEMBERS"),
        (
            (row.name, short_name(row.accelerator), f"{row.smallest}–{row.largest}", row.provider,
             ", ".join(row.zones) or "-", ", ".join(row.capacity),
             ", ".join(row.members) or "all users")
            for row in pools
        ),
        output.none_yet("pools", "tpu pool create NAME TYPE"),
        value={"pools": pools},
    )  # fmt: skip


@pool.command(epilog=example("tpu pool show lab"))
@click.argument("name")
@json_option
def show(name: str) -> None:
    """Show pool NAME and its slices."""
    with connection.connect() as client:
        row = client.pool(name)
        slices = client.slices(pool=name)
    if output.printed_json({"pool": row, "slices": slices}):
        return
    fields: list[tuple[str, Cell]] = [
        ("pool", row.name),
        ("type", short_name(row.accelerator)),
        ("slices", f"{len(slices)} now; {row.smallest} to {row.largest}"),
        ("ready for a job", _ready_for_a_job(slices)),
        ("provider", row.provider),
        ("zones", ", ".join(row.zones)),
        ("capacity", ", ".join(row.capacity)),
        ("members", ", ".join(row.members) or "all users"),
        ("per user", str(row.slices_per_user or "")),
        ("supersede", "yes" if row.supersede else "no"),
        (
            "held after a failure",
            str(durations.to_builtin(row.hold_after_failure)) if row.hold_after_failure else "",
        ),
        ("idle after", str(durations.to_builtin(row.idle_after))),
        *((f"pod {name}", str(value)) for name, value in schema.to_document(row.pod).items()),
    ]
    output.print_fields(fields)
    for tpu_slice in slices:
        click.echo(
            f"  {tpu_slice.id}  {tpu_slice.state}  {tpu_slice.zone}  {tpu_slice.job_id or 'idle'}"
        )


def _ready_for_a_job(slices: Sequence[SliceRow]) -> str:
    """How many, and what they cost until one takes them."""
    ready = [each for each in slices if each.state is SliceState.READY and each.job_id is None]
    if not ready:
        return ""
    table = prices.price_table(connection.settings().prices)
    hourly = [
        price and price * each.chips
        for each in ready
        for price in [prices.chip_hour_price(each.accelerator, each.capacity, table)]
    ]
    usd = "unpriced" if None in hourly else f"${prices.amount(sum(filter(None, hourly)))} per hour"
    simulated = " (simulated)" if ready[0].provider in SIMULATED_PROVIDERS else ""
    return f"{len(ready)}, {usd}{simulated}"


@pool.command(epilog=example("tpu pool delete lab"))
@click.argument("name")
@yes_option
@json_option
def delete(name: str, yes: bool) -> None:
    """Delete pool NAME; its idle slices are released, and its reservations end."""
    with connection.connect() as client:
        reserved = [each for each in client.reservations() if each.pool == name]
        what = f"pool {name}"
        if reserved:
            owners = ", ".join(dict.fromkeys(each.owner for each in reserved))
            what += f" and end {text.counted(len(reserved), 'reservation')} (of {owners})"
        output.confirm_deletion(what, yes or output.as_json())
        client.delete_pool(name)
    ended = f"; ended {text.counted(len(reserved), 'reservation')}" if reserved else ""
    value = {"deleted": name, "ended_reservations": [each.id for each in reserved]}
    output.print_deleted(value, f"pool {name}{ended}")

"""`tpu pool`: named, bounded claims on capacity."""

from __future__ import annotations

import click

from tpufleet.errors import BadInput
from tpufleet.model import durations, topology
from tpufleet.model.job_file import label_error, zone_error
from tpufleet.model.jobs import Capacity
from tpufleet.model.pools import Pool
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import Cell, json_option


@click.group()
def pool() -> None:
    """Pools: which slices may exist at once, and who may use them."""


@pool.command(
    epilog="\b\nExamples:\n  tpu pool create lab v5e-16 --largest 4\n"
    "  tpu pool create sim v5e-16 --provider local --largest 2 --smallest 1\n"
)
@click.argument("name")
@click.argument("accelerator", metavar="TYPE")
@click.option("--provider", default="local", show_default=True, help="local, tpu-vm or gke.")
@click.option(
    "--largest", default=1, show_default=True, type=click.IntRange(min=1), help="Most at a time."
)
@click.option(
    "--smallest", default=0, show_default=True, type=click.IntRange(min=0), help="Kept ready."
)
@output.repeatable("--zone", help="Zone; repeat it in order of preference.")
@output.repeatable(
    "--capacity",
    type=click.Choice([kind.value for kind in Capacity]),
    help="Kind of capacity; repeat it in order of preference (default: spot).",
)
@output.repeatable("--member", help="Who may use it (default: everybody).")
@click.option("--per-user", type=click.IntRange(min=1), help="Most slices one user may hold.")
@click.option("--supersede", is_flag=True, help="Higher priority may take slices from lower.")
@click.option("--idle-after", default="10m", show_default=True, help="Idle slices go after this.")
@json_option
def create(
    name: str,
    accelerator: str,
    provider: str,
    largest: int,
    smallest: int,
    zone: tuple[str, ...],
    capacity: tuple[str, ...],
    member: tuple[str, ...],
    per_user: int | None,
    supersede: bool,
    idle_after: str,
    as_json: bool,
) -> None:
    """Create pool NAME of slices of TYPE, or change it. With no server, one is started here."""
    idle = durations.parse(idle_after)
    faults = [
        *(f"name: {fault}" for fault in [label_error(name)] if fault),
        *(f"--zone: {fault}" for fault in map(zone_error, zone) if fault),
        *(["--smallest: larger than --largest; make it smaller"] if smallest > largest else []),
        *(["--idle-after: cannot be none; use --smallest to keep slices"] if idle is None else []),
    ]
    if faults or idle is None:
        raise BadInput("\n".join(faults))
    wanted = Pool(
        name=name,
        provider=provider,
        accelerator=topology.find(accelerator).name,
        largest=largest,
        smallest=smallest,
        zones=zone,
        capacity=tuple(Capacity(kind) for kind in capacity) or (Capacity.SPOT,),
        members=member,
        slices_per_user=per_user,
        supersede=supersede,
        idle_after=idle,
    )
    with connection.connect(start=True) as client:
        made = client.put_pool(wanted)
    if as_json:
        output.print_json(made)
    else:
        click.echo(f"pool {name}: up to {largest} × {made.accelerator} from {provider}; "
                   f"`tpu run {accelerator} --pool {name} -- CMD` uses it")  # fmt: skip


@pool.command("list", epilog="\b\nExample:\n  tpu pool list\n")
@json_option
def list_pools(as_json: bool) -> None:
    """List the pools."""
    with connection.connect() as client:
        pools = client.pools()
    if as_json:
        output.print_json({"pools": pools})
        return
    output.print_table(
        ("POOL", "TYPE", "SLICES", "PROVIDER", "ZONES", "CAPACITY", "MEMBERS"),
        (
            (found.name, found.accelerator, f"{found.smallest}–{found.largest}", found.provider,
             ", ".join(found.zones) or "-", ", ".join(found.capacity),
             ", ".join(found.members) or "everybody")
            for found in pools
        ),
        "no pools; `tpu pool create NAME TYPE` makes one",
    )  # fmt: skip


@pool.command(epilog="\b\nExample:\n  tpu pool show lab\n")
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Show pool NAME and the slices in it."""
    with connection.connect() as client:
        found = client.pool(name)
        held = client.slices(pool=name)
    if as_json:
        output.print_json({"pool": found, "slices": held})
        return
    facts: list[tuple[str, Cell]] = [
        ("pool", found.name),
        ("type", found.accelerator),
        ("slices", f"{len(held)} now; from {found.smallest} to {found.largest}"),
        ("provider", found.provider),
        ("zones", ", ".join(found.zones)),
        ("capacity", ", ".join(found.capacity)),
        ("members", ", ".join(found.members) or "everybody"),
        ("per user", str(found.slices_per_user or "")),
        ("supersede", "yes" if found.supersede else "no"),
        ("idle after", str(durations.to_builtin(found.idle_after))),
    ]
    output.print_fields(facts)
    for row in held:
        click.echo(f"  {row.id}  {row.state}  {row.zone}  {row.job_id or 'idle'}")


@pool.command(epilog="\b\nExample:\n  tpu pool delete lab --yes\n")
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
def delete(name: str, yes: bool, as_json: bool) -> None:
    """Delete pool NAME; its idle slices are released."""
    output.confirm(f"delete pool {name}?", yes or as_json)
    with connection.connect() as client:
        client.delete_pool(name)
    if as_json:
        output.print_json({"deleted": name})
    else:
        click.echo(f"deleted pool {name}")

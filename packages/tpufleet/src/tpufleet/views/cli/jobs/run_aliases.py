"""What the user's preferences mean on the command line of `tpu run`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tpufleet.errors import BadInput, Unauthorized, Unreachable
from tpufleet.model.fleet.inventory import InventoryRow, InventoryState
from tpufleet.model.people.preferences import Preferences
from tpufleet.model.tpu import type_lookup
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet.views.cli import connection
from tpufleet.views.cli.output import print_status
from tpufleet.views.cli.settings.preferences import PATH_PREFIX, find_folder
from tpufleet.views.cli.slices.inventory import (
    FREE_STATES,
    GENERATION,
    TYPE_NAME,
    generation_pattern,
    named_slices,
)

_TYPE_IN_NAME = re.compile(rf"\b{TYPE_NAME}\b")


class RunTarget(NamedTuple):
    accelerator: str
    command: tuple[str, ...]
    workdir: Path | None = None
    pool: str | None = None  # of the slice that was named or chosen


def resolve(
    accelerator: str, command: tuple[str, ...], config_values: tuple[str, ...], folder: str | None
) -> RunTarget:
    """The TPU type, the command and the folder that are meant. The server is asked only where an
    alias may be involved."""
    known_type = type_lookup.is_known(accelerator)
    if known_type and not config_values and folder is None:
        return RunTarget(accelerator, command)
    # A mistyped type must not start a server, nor need a token; aliases of a server that is stopped
    # are not known.
    needs_preferences = bool(config_values) or folder is not None
    pool = None
    try:
        with connection.connect(start=needs_preferences) as client:
            preferences = client.preferences()
            typed = accelerator
            if not known_type:
                accelerator = preferences.tpu_aliases.get(accelerator, accelerator)
            if not type_lookup.is_known(accelerator):
                accelerator, pool = _in_inventory(client.inventory().rows, accelerator)
            if not type_lookup.is_known(accelerator) and (
                typed != accelerator or _names_type(typed)
            ):
                raise _unknown_node(typed, accelerator)
    except (Unreachable, Unauthorized) as error:
        is_alias = isinstance(error, Unauthorized) and not re.match(r"v\d", accelerator)
        if needs_preferences or is_alias:
            raise
        return RunTarget(accelerator, command)
    arguments = tuple(config_argument(preferences, pair) for pair in config_values)
    workdir = Path(find_folder(preferences, folder)) if folder is not None else None
    return RunTarget(accelerator, (*command, *arguments), workdir, pool)


def _in_inventory(rows: Sequence[InventoryRow], name: str) -> tuple[str, str | None]:
    """Type and pool of a slice by its name or alias, or of a free one of a generation (`v4`, `v4+`,
    `v*`): slices that exist first, then room in pools. Unknown names are returned as they are."""
    found = named_slices(rows, name)
    if not found and GENERATION.fullmatch(name):
        wanted = generation_pattern(name)
        free = [row for row in rows if row.state in FREE_STATES and row.pool]
        found = [row for row in free if wanted.fullmatch(row.accelerator)]
        found.sort(key=lambda row: row.state is InventoryState.AVAILABLE)
        if not found:
            types = [short_name(each) for each in type_lookup.all_types() if wanted.fullmatch(each)]
            raise BadInput(
                f"no free slice of {name} in any pool\n"
                f"  next: `tpu inventory {name}` lists those in use; name a type, such as "
                f"{types[0] if types else 'v4-8'}, to request a new one"
            )
    if not found:
        return name, None
    kind, pool = short_name(found[0].accelerator), found[0].pool
    where = f" in pool {pool}" if pool else ""
    print_status(f"{name}: {kind}{where}")
    return kind, pool


def _unknown_node(alias: str, node: str) -> BadInput:
    """Aliases of the former job manager mean nodes, which have to be adopted first."""
    found = _types_in(node)
    new = f"; or `tpu run {found[-1]} -- …` on a new slice" if found else ""
    what = f"{alias} is an alias of {node}, which" if alias != node else node
    return BadInput(
        f"{what} is neither a TPU type nor a slice of this server\n"
        f"  next: an admin makes the TPU VM usable with `tpu adopt {node} --pool POOL`{new}"
    )


def _types_in(name: str) -> list[str]:
    return [match[0] for match in _TYPE_IN_NAME.finditer(name) if type_lookup.is_known(match[0])]


def _names_type(name: str) -> bool:
    """As names of nodes do, such as lab-v4-32-spot-1, or v4-32-spot-1 without its prefix."""
    return bool(_types_in(name)) and name != _types_in(name)[0]


def config_argument(preferences: Preferences, pair: str) -> str:
    """`lr=0.1` → `--config.training.learning_rate=0.1`. Everything after the first `=` is value."""
    key, equals, value = pair.partition("=")
    path = preferences.all_config_aliases.get(key, key)
    if not equals or not path.startswith(PATH_PREFIX):
        known = ", ".join(sorted(preferences.all_config_aliases))
        raise BadInput(
            f"--config {pair}: write KEY=VALUE, where KEY is a path that starts with config, or "
            f"one of {known}; `tpu config alias set {key or 'NAME'} PATH` adds one"
        )
    return f"--{path}={value}"

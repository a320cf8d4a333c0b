"""TPU types by any of their spellings: v5litepod-16 (or v5e-16) has 16 chips on 4 hosts."""

from __future__ import annotations

import difflib
import math
import re
from functools import cache
from typing import Annotated, Any

import msgspec

from tpufleet import schema
from tpufleet.errors import BadInput, invalid, quote, unknown
from tpufleet.model.tpu import tpu_types


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One type of slice."""

    name: str  # as the Cloud TPU API spells it: v5litepod-16
    generation: str
    topology: str
    chips: int
    hosts: int
    chips_per_host: int
    runtime: str | None  # default TPU VM software; None where no TPU VM exists
    gke_accelerator: str | None
    machine_type: str | None


@cache
def all_types() -> dict[str, Accelerator]:
    """Every type under its API name. Where a name has two forms, the TPU VM form."""
    generations = {row[1]: row for row in tpu_types.GENERATIONS}
    types: dict[str, Accelerator] = {}
    for name, topology, chips, hosts, chips_per_host, machine_type in tpu_types.TYPES:
        generation, _, _, _, _, runtime, gke = generations[name.rsplit("-", 1)[0]]
        types.setdefault(
            name,
            Accelerator(
                name=name,
                generation=generation,
                topology=topology,
                chips=chips,
                hosts=hosts,
                chips_per_host=chips_per_host,
                runtime=runtime,
                gke_accelerator=gke,
                machine_type=machine_type,
            ),
        )
    return types


@cache
def spellings() -> dict[str, str]:
    """Every accepted spelling, in lower case, with its API name."""
    known = {name: name for name in all_types()}
    for _, prefix, aliases, *_ in tpu_types.GENERATIONS:
        for alias in aliases:
            for name in all_types():
                stem, _, size = name.rpartition("-")
                if stem == prefix:
                    known[f"{alias}-{size}"] = name
    return known


@cache
def _by_topology() -> dict[str, str]:
    """`tpu7x-2x4x4`: cores or chips, which numbers count, do not matter there."""
    prefixes = {prefix: (prefix, *aliases) for _, prefix, aliases, *_ in tpu_types.GENERATIONS}
    return {
        f"{prefix}-{kind.topology}": name
        for name, kind in all_types().items()
        for prefix in prefixes[name.rpartition("-")[0]]
    }


def _canonical(spelling: str) -> str | None:
    wanted = spelling.strip().lower()
    return spellings().get(wanted) or _by_topology().get(wanted)


@cache
def short_name(name: str) -> str:
    """As people write it: v5e-16, not v5litepod-16. Other text stays as it is."""
    prefix, _, size = name.rpartition("-")
    aliases = {row[1]: row[2] for row in tpu_types.GENERATIONS}.get(prefix)
    return f"{aliases[0]}-{size}" if aliases else name


def find(spelling: str) -> Accelerator:
    """The type with this spelling, or an error that names the nearest one."""
    canonical = _canonical(spelling)
    if canonical is None:
        raise BadInput(f"unknown TPU type {quote(spelling)}{suggestion(spelling)}")
    return all_types()[canonical]


def parse_name(value: Any) -> str:
    """The API name of a type in any spelling."""
    if not isinstance(value, str) or not re.fullmatch(r"[ -~]{1,40}", value):
        raise invalid(value, "a TPU type", "v5e-16")
    return find(value).name


def _parse_generation(value: Any) -> str:
    known = sorted({kind.generation for kind in all_types().values()})
    if value not in known:
        raise unknown("generation", value, known)
    return str(value)


Generation = Annotated[str, schema.custom("generation", _parse_generation)]
TypeName = Annotated[str, schema.custom("TPU type", parse_name, {"type": "string"})]


def is_known(spelling: str) -> bool:
    return _canonical(spelling) is not None


def suggestion(spelling: str) -> str:
    """ "; did you mean v5e-16?", from the sizes of the same generation where that is known."""
    wanted = spelling.strip().lower()
    stem, _, size = wanted.rpartition("-")
    siblings = [name for name in spellings() if name.rpartition("-")[0] == stem]
    if siblings and re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9}){0,3}", size):
        largest = max(siblings, key=lambda name: int(name.rpartition("-")[2]))
        chips = all_types()[spellings()[largest]].chips
        if "x" in size:
            beyond = math.prod(map(int, size.split("x"))) > chips
        else:
            beyond = int(size) > int(largest.rpartition("-")[2])
        if beyond:
            return f"; the largest slice has {chips:,} chips: {largest}"
        if size.isdecimal():
            nearest = min(siblings, key=lambda name: abs(int(name.rpartition("-")[2]) - int(size)))
            return f"; the nearest size is {nearest}"
    generation = next((letter for letter in stem if letter.isdecimal()), "")
    same = [name for name in spellings() if generation and generation in name.rpartition("-")[0]]
    close = difflib.get_close_matches(wanted, same or spellings(), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else "; run `tpu types` for the list"

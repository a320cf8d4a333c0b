"""Where in a decoder activations are read, and how people name the places.

`resid_post.12`, `mlp_out.*`, `resid_post.[4,8,12]`, `resid_post.4-8`, `final_norm`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum

from tpufleet.errors import BadInput
from tpufleet.workloads.activations.model.architectures import Architecture


class Site(StrEnum):
    RESID_PRE = "resid_pre"  # what enters the layer
    RESID_POST = "resid_post"  # what leaves it
    ATTN_OUT = "attn_out"  # what attention adds to the residual stream
    MLP_OUT = "mlp_out"  # what the MLP adds to it
    MLP_HIDDEN = "mlp_hidden"  # the gated hidden units, before the down projection
    ATTN_HEADS = "attn_heads"  # the heads' outputs side by side, before the output projection
    FINAL_NORM = "final_norm"  # after the last norm; belongs to no layer


# The names that the older extraction scripts used.
LEGACY_NAMES = {"residual": Site.RESID_POST, "mlp": Site.MLP_OUT, "attn": Site.ATTN_OUT}

_CHOICE = re.compile(r"(?P<site>[a-z_]+)(?:\.(?P<layers>\*|\d+(?:-\d+)?|\[[\d,\s-]+\]))?$")


def resolve(choices: Iterable[str], architecture: Architecture) -> tuple[str, ...]:
    """Every (site, layer) asked for, once, by site and then layer: `('resid_post.3', …)`."""
    found: set[tuple[int, int]] = set()
    order = list(Site)
    for choice in split_choices(choices):
        site, layers = _parse(choice.strip(), architecture.layers)
        found.update((order.index(site), layer) for layer in layers)
    if not found:
        raise BadInput("no site was asked for; try resid_post.*")
    return tuple(
        order[place] if layer < 0 else f"{order[place]}.{layer}" for place, layer in sorted(found)
    )


def parse_site(name: str) -> Site:
    """The site of a name, or of the name that it had formerly."""
    if name not in LEGACY_NAMES and name not in set(Site):
        raise BadInput(f"{name!r} names no site; write one of {', '.join(Site)}")
    return LEGACY_NAMES.get(name) or Site(name)


def split_choices(choices: Iterable[str]) -> Iterator[str]:
    """Choices may be joined by commas; commas inside brackets belong to the choice."""
    for choice in choices:
        yield from re.split(r",(?![^\[]*\])", choice)


def split_name(name: str) -> tuple[Site, int]:
    """The site and layer of a resolved name; the final norm has layer -1."""
    site, _, layer = name.partition(".")
    return Site(site), int(layer) if layer else -1


def width(name: str, architecture: Architecture) -> int:
    """How many numbers one token has there."""
    site = split_name(name)[0]
    if site is Site.MLP_HIDDEN:
        return architecture.intermediate
    if site is Site.ATTN_HEADS:
        return architecture.heads * architecture.head_dim
    return architecture.hidden


def layers_needed(names: Iterable[str], architecture: Architecture) -> int:
    """How many layers must be run for these sites; nothing above is loaded or computed."""
    needed = 0
    for name in names:
        site, layer = split_name(name)
        if site is Site.FINAL_NORM:
            return architecture.layers
        needed = max(needed, layer + (0 if site is Site.RESID_PRE else 1))
    return needed


def _parse(choice: str, count: int) -> tuple[Site, Iterable[int]]:
    match = _CHOICE.match(choice)
    if match is None:
        raise BadInput(f"{choice!r} names no site; write it as in resid_post.12")
    site = parse_site(match["site"])
    if site is Site.FINAL_NORM:
        if match["layers"]:
            raise BadInput(f"{choice!r}: final_norm has no layer")
        return site, (-1,)
    layers = list(_layers(match["layers"] or "*", count))
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong or not layers:
        raise BadInput(f"{choice!r}: the model has layers 0 to {count - 1}")
    return site, layers


def _layers(text: str, count: int) -> Iterable[int]:
    if text == "*":
        return range(count)
    layers: list[int] = []
    for piece in text.strip("[]").split(","):
        first, _, last = piece.strip().partition("-")
        layers += range(int(first), int(last or first) + 1)
    return layers

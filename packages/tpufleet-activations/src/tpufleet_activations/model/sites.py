"""Sites: the points of a decoder where activations are read, and their names.

`resid_post.12`, `mlp_out.*`, `resid_post.[4,8,12]`, `resid_post.4-8`, `final_norm`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum

from tpufleet.errors import BadInput
from tpufleet_activations.input_errors import check_choice
from tpufleet_activations.model.architectures import Architecture


class Site(StrEnum):
    RESID_PRE = "resid_pre"  # residual stream before the layer
    RESID_POST = "resid_post"  # residual stream after the layer
    ATTN_OUT = "attn_out"  # what attention adds to the residual stream
    MLP_OUT = "mlp_out"  # what the MLP adds to the residual stream
    MLP_HIDDEN = "mlp_hidden"  # gated hidden units, before the down projection
    ATTN_HEADS = "attn_heads"  # concatenated heads, before the output projection
    FINAL_NORM = "final_norm"  # after the final norm; has no layer


_CHOICE = re.compile(r"(?P<site>[a-z_]+)(?:\.(?P<layers>\*|\d+(?:-\d+)?|\[[\d,\s-]+\]))?$")


def resolve(choices: Iterable[str], architecture: Architecture) -> tuple[str, ...]:
    """The selected (site, layer) names without duplicates, by site and layer."""
    selected: set[tuple[int, int]] = set()
    order = list(Site)
    for choice in split_choices(choices):
        site, layers = _parse(choice.strip(), architecture.layers)
        selected.update((order.index(site), layer) for layer in layers)
    return tuple(
        order[number] if layer < 0 else f"{order[number]}.{layer}"
        for number, layer in sorted(selected)
    )


def parse_site(name: str) -> Site:
    check_choice("site", name, list(Site))
    return Site(name)


def split_choices(choices: Iterable[str]) -> Iterator[str]:
    """Split choices at commas outside brackets."""
    for choice in choices:
        if choice.count("[") != choice.count("]"):  # invalid, and reported as a whole
            yield choice
            continue
        yield from re.split(r",(?![^\[]*\])", choice)


def split_name(name: str) -> tuple[Site, int]:
    """The site and layer of a resolved name; layer -1 for the final norm."""
    site, _, layer = name.partition(".")
    return Site(site), int(layer) if layer else -1


def width(name: str, architecture: Architecture) -> int:
    """The length of one token's activation vector."""
    site = split_name(name)[0]
    if site is Site.MLP_HIDDEN:
        return architecture.intermediate
    if site is Site.ATTN_HEADS:
        return architecture.heads * architecture.head_dim
    return architecture.hidden


def layers_needed(names: Iterable[str], architecture: Architecture) -> int:
    """How many layers must run for these sites; later layers are neither loaded nor computed."""
    needed = 0
    for name in names:
        site, layer = split_name(name)
        if site is Site.FINAL_NORM:
            return architecture.layers
        needed = max(needed, layer + (0 if site is Site.RESID_PRE else 1))
    return needed


def _parse(choice: str, count: int) -> tuple[Site, Iterable[int]]:
    match = _CHOICE.match(choice)
    if match is not None:
        site = parse_site(match["site"])
        if site is Site.FINAL_NORM and not match["layers"]:
            return site, (-1,)
        layers = list(_layers(match["layers"] or "*", count))
        if site is not Site.FINAL_NORM and layers and all(0 <= layer < count for layer in layers):
            return site, layers
    raise BadInput(
        f"invalid site {choice!r}; expected final_norm, or a form such as resid_post.12 or "
        f"resid_post.4-8 with layers 0 to {count - 1}"
    )


def _layers(text: str, count: int) -> Iterable[int]:
    if text == "*":
        return range(count)
    layers: list[int] = []
    for piece in text.strip("[]").split(","):
        first, _, last = piece.strip().partition("-")
        layers += range(int(first), int(last or first) + 1)
    return layers

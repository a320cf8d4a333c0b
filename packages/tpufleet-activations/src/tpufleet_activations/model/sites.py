"""Sites: the points of a decoder where activations are read, and their names.

`resid_post.12`, `mlp_out.*`, `resid_post.[4,8,12]`, `resid_post.4-8`, `attn_heads.4.[0,3]` (some
heads of a layer), `final_norm`, `top_logits.10`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from tpufleet.errors import BadInput
from tpufleet_activations.input_errors import check_choice
from tpufleet_activations.model.architectures import Architecture


class Site(StrEnum):
    EMBED = "embed"  # token embeddings as the model scales them; has no layer
    RESID_PRE = "resid_pre"  # residual stream before the layer
    RESID_MID = "resid_mid"  # residual stream between attention and MLP
    RESID_POST = "resid_post"  # residual stream after the layer
    ATTN_OUT = "attn_out"  # what attention adds to the residual stream
    MLP_OUT = "mlp_out"  # what the MLP adds to the residual stream
    MLP_HIDDEN = "mlp_hidden"  # hidden units, with their gate, before the down projection
    ATTN_HEADS = "attn_heads"  # concatenated heads, before the output projection
    ATTN_INPUT = "attn_input"  # what queries, keys and values are computed from
    ATTN_SCALE = "attn_scale"  # by which the norm before it divides
    Q = "q"  # queries, keys and values of all heads, before rotary positions
    K = "k"
    V = "v"
    ROT_Q = "rot_q"  # with rotary positions
    ROT_K = "rot_k"
    ATTN_PATTERN = "attn_pattern"  # of one head: weights of the sample's positions
    MLP_INPUT = "mlp_input"  # what the MLP, or the router, reads
    MLP_SCALE = "mlp_scale"
    MLP_PRE = "mlp_pre"  # before the activation function
    MLP_UP = "mlp_up"  # what the gate is multiplied with
    ROUTER_LOGITS = "router_logits"
    EXPERTS = "experts"  # numbers of the chosen experts, the heaviest first
    EXPERT_WEIGHTS = "expert_weights"
    FINAL_NORM = "final_norm"  # after the final norm; has no layer
    TOP_LOGITS = "top_logits"  # the largest logits; their number is in place of a layer
    TOP_TOKENS = "top_tokens"  # the tokens that they are of


class Point(NamedTuple):
    """A site of one layer (-1: of none), or of one of its heads."""

    site: Site
    layer: int = -1
    head: int | None = None

    def __str__(self) -> str:
        parts = (self.site, *[str(one) for one in self[1:] if one not in (None, -1)])
        return ".".join(parts)


ONCE = (Site.EMBED, Site.FINAL_NORM)
TOP = (Site.TOP_LOGITS, Site.TOP_TOKENS)  # of the output head
QUERY_HEADS = (Site.Q, Site.ROT_Q, Site.ATTN_HEADS, Site.ATTN_PATTERN)
KEY_HEADS = (Site.K, Site.V, Site.ROT_K)
MIXTURE = (Site.ROUTER_LOGITS, Site.EXPERTS, Site.EXPERT_WEIGHTS)
SINGLE_MLP = (Site.MLP_HIDDEN, Site.MLP_PRE, Site.MLP_UP)
SCALES = (Site.ATTN_SCALE, Site.MLP_SCALE)
# Values of all patterns of a token: they grow with the length of the samples.
MOST_PATTERN_VALUES = 65_536
MOST_LOGITS = 1000
_NUMBERS = r"(?:\*|\d+(?:-\d+)?|\[[\d,\s-]+\])"
_CHOICE = re.compile(
    rf"(?P<site>[a-z_]+)(?:\.(?P<layers>{_NUMBERS}))?(?:\.(?P<heads>{_NUMBERS}))?$"
)


def resolve(choices: Iterable[str], architecture: Architecture) -> tuple[str, ...]:
    """The selected names without duplicates, by site, layer and head."""
    order = list(Site)
    selected = {
        point for choice in split_choices(choices) for point in _parse(choice.strip(), architecture)
    }
    place = lambda point: (
        order.index(point.site),
        point.layer,
        -1 if point.head is None else point.head,
    )
    return tuple(str(point) for point in sorted(selected, key=place))


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


def split_name(name: str) -> Point:
    site, *numbers = name.split(".")
    return Point(Site(site), *map(int, numbers))


def missing(site: Site, arch: Architecture) -> bool:
    """Whether decoders of this kind have no such site."""
    return (
        (site in MIXTURE and not arch.experts)
        or (site in SINGLE_MLP and bool(arch.experts))
        or (site is Site.MLP_UP and not arch.gated)
        or (site is Site.RESID_MID and arch.parallel)
        or (site in SCALES and not arch.pre_norms)
    )


def width(name: str, architecture: Architecture, longest: int = 0) -> int:
    """The length of one token's activation vector, of samples of at most `longest` tokens."""
    site, number, head = split_name(name)
    if site is Site.ATTN_PATTERN:
        return longest
    if site in QUERY_HEADS or site in KEY_HEADS:
        heads = architecture.kv_heads if site in KEY_HEADS else architecture.heads
        return architecture.head_dim * (heads if head is None else 1)
    if site in SINGLE_MLP:
        return architecture.intermediate
    if site in SCALES:
        return 1
    if site is Site.ROUTER_LOGITS:
        return architecture.experts
    if site in MIXTURE:
        return architecture.experts_per_token
    return number if site in TOP else architecture.hidden


def has_patterns(names: Iterable[str]) -> bool:
    return any(split_name(name).site is Site.ATTN_PATTERN for name in names)


def check_patterns(names: Iterable[str], longest: int) -> None:
    count = sum(split_name(name).site is Site.ATTN_PATTERN for name in names)
    if count * longest > MOST_PATTERN_VALUES:
        raise BadInput(
            f"{count} attention patterns of {longest:,} positions are more than "
            f"{MOST_PATTERN_VALUES:,} values for each token; choose fewer heads, or a smaller "
            "--max-length"
        )


def layers_needed(names: Iterable[str], architecture: Architecture) -> int:
    """How many layers must run for these sites; later layers are neither loaded nor computed."""
    needed = 0
    for name in names:
        site, layer, _ = split_name(name)
        if site is Site.FINAL_NORM or site in TOP:
            return architecture.layers
        needed = max(needed, layer + (0 if site is Site.RESID_PRE else 1))
    return needed


def head_needed(names: Iterable[str]) -> bool:
    """Whether the output head is."""
    return any(split_name(name).site in TOP for name in names)


def final_norm_needed(names: Iterable[str]) -> bool:
    return any(split_name(name).site in (Site.FINAL_NORM, *TOP) for name in names)


def _parse(choice: str, arch: Architecture) -> Iterable[Point]:
    match = _CHOICE.match(choice)
    if match is not None:
        site = parse_site(match["site"])
        if missing(site, arch):
            names = [str(one) for one in Site if not missing(one, arch)]
            raise BadInput(f"{arch.family} has no site {site}; its sites are {', '.join(names)}")
        points = list(_points(site, match["layers"], match["heads"], arch))
        if points and all(_exists(point, arch) for point in points):
            return points
    raise BadInput(
        f"invalid site {choice!r}; expected final_norm, top_logits.10, or a form such as "
        f"resid_post.12, resid_post.4-8 or attn_pattern.4.[0,3] with layers 0 to {arch.layers - 1}"
    )


def _points(
    site: Site, layers: str | None, heads: str | None, arch: Architecture
) -> Iterator[Point]:
    if site in ONCE and layers is None:
        yield Point(site)
        return
    if site in ONCE or (site is Site.ATTN_PATTERN and heads is None):
        return
    count = arch.kv_heads if site in KEY_HEADS else arch.heads
    chosen = [None] if heads is None else list(_numbers(heads, count))
    for layer in _numbers(layers or "*", 0 if site in TOP else arch.layers):
        yield from (Point(site, layer, head) for head in chosen)


def _exists(point: Point, arch: Architecture) -> bool:
    if point.site in TOP:
        return 0 < point.layer <= min(MOST_LOGITS, arch.vocabulary) and point.head is None
    if point.head is None:
        return point.layer < arch.layers
    count = {**dict.fromkeys(QUERY_HEADS, arch.heads), **dict.fromkeys(KEY_HEADS, arch.kv_heads)}
    return point.layer < arch.layers and point.head < count.get(point.site, 0)


def _numbers(text: str, count: int) -> Iterable[int]:
    if text == "*":
        return range(count)
    numbers: list[int] = []
    for piece in text.strip("[]").split(","):
        first, _, last = piece.strip().partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers

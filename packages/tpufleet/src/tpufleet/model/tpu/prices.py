"""Prices per chip hour, with date and source. Prices in the config take precedence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tpufleet import schema
from tpufleet.model.job.jobs import Capacity, JobSpec
from tpufleet.model.tpu import type_lookup
from tpufleet.schema import about


class Price(msgspec.Struct, frozen=True, kw_only=True):
    generation: str
    capacity: Capacity
    usd: float  # for one chip, one hour
    as_of: str
    source: str


LIST_PRICE_SOURCE = "cloud.google.com/tpu/pricing, on demand, us regions"
# Spot prices vary by month and zone; this fraction is an assumption, and is shown as one.
SPOT_SHARE = 0.4
_ON_DEMAND = {
    "v2": (1.125, "2025-06"), "v3": (2.0, "2025-06"), "v4": (3.22, "2025-06"),
    "v5e": (1.2, "2026-09"), "v5p": (4.2, "2026-09"), "v6e": (2.7, "2026-09"),
    "tpu7x": (12.0, "2026-09"),  # us-central1
}  # fmt: skip
# Spot and flex-start, where they are known.
_CATALOGUE = ("2026-08", "cloudbilling.googleapis.com, us-east5")
_OTHERS = {
    ("v6e", Capacity.SPOT): (1.4033, *_CATALOGUE),
    ("v6e", Capacity.QUEUED): (1.35, *_CATALOGUE),
    ("tpu7x", Capacity.QUEUED): (6.0, "2026-09", "cloud.google.com/tpu/pricing, flex-start"),
}


class _PriceSettings(msgspec.Struct, frozen=True, kw_only=True):
    as_of: Annotated[
        str,
        schema.text("month or day", r"[0-9]{4}-[0-9]{2}(-[0-9]{2})?", example="2026-11"),
        about("When they held."),
    ] = ""
    source: Annotated[str, Meta(max_length=200), about("Where they are from.")] = "config"
    prices: Annotated[
        dict[type_lookup.Generation, dict[Capacity, Annotated[float, Meta(ge=0)]]],
        about("Dollars for one chip and hour.", example="{v5e: {spot: 0.5}}"),
    ] = {}


_ABOUT_ALL = ("as_of", "source")


def price_table(overrides: Mapping[str, Any] | None = None) -> dict[tuple[str, str], Price]:
    """By generation and capacity type. `overrides` is as in a config file: {v5e: {spot: 0.5}}, and
    may have `as_of` and `source`."""
    prices: dict[tuple[str, str], Price] = {}
    for generation, (usd, as_of) in _ON_DEMAND.items():
        for capacity in Capacity:
            spot = capacity is Capacity.SPOT
            prices[generation, capacity] = Price(
                generation=generation,
                capacity=capacity,
                usd=round(usd * SPOT_SHARE, 4) if spot else usd,
                as_of=as_of,
                source=f"assumed: {SPOT_SHARE:.0%} of the list price"
                if spot
                else LIST_PRICE_SOURCE,
            )
    for (generation, capacity), (usd, as_of, source) in _OTHERS.items():
        prices[generation, capacity] = Price(
            generation=generation, capacity=capacity, usd=usd, as_of=as_of, source=source
        )
    about_all = {key: value for key, value in (overrides or {}).items() if key in _ABOUT_ALL}
    own = {key: value for key, value in (overrides or {}).items() if key not in _ABOUT_ALL}
    chosen = schema.parse(_PriceSettings, {"prices": own, **about_all})
    for generation, kinds in chosen.prices.items():
        for kind, usd in kinds.items():
            prices[generation, kind] = Price(
                generation=generation, capacity=kind, usd=usd,
                as_of=chosen.as_of, source=chosen.source,
            )  # fmt: skip
    return prices


def chip_hour_price(
    accelerator: str, capacity: str, prices: Mapping[tuple[str, str], Price]
) -> float | None:
    """In USD; None where no price is known."""
    price = prices.get((type_lookup.find(accelerator).generation, capacity))
    return price.usd if price is not None else None


def source_price(
    spec: JobSpec, capacity: str, prices: Mapping[tuple[str, str], Price]
) -> float | None:
    """USD per hour of all slices of a job, with this capacity type; None: no price is known."""
    usd = chip_hour_price(spec.accelerator, capacity, prices)
    return None if usd is None else usd * type_lookup.find(spec.accelerator).chips * spec.max_slices


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a job costs while it runs, before it is launched."""

    chips: int
    usd_per_hour: float | None  # None: no price is known
    capacity: str
    source: str  # of the price
    as_of: str
    limit: float | None = None  # the most that it can cost, if that is known


def amount(value: float) -> str:
    """With at least two decimals, and at least two significant digits: `1,234.50`, `0.0031`."""
    decimals = 2
    if value and math.isfinite(value):
        decimals = max(2, 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def estimate(spec: JobSpec, prices: Mapping[tuple[str, str], Price]) -> Estimate:
    """With the first capacity type that the job prefers."""
    kind = type_lookup.find(spec.accelerator)
    chips = kind.chips * spec.max_slices
    price = prices.get((kind.generation, spec.capacity[0]))
    hourly = chips * price.usd if price is not None else None
    return Estimate(
        chips=chips,
        usd_per_hour=hourly,
        capacity=spec.capacity[0].value,
        source=price.source if price is not None else "",
        as_of=price.as_of if price is not None else "",
        limit=_most(spec, hourly),
    )


def _most(spec: JobSpec, hourly: float | None) -> float | None:
    limits = [spec.max_cost] if spec.max_cost is not None else []
    if spec.max_hours is not None and hourly is not None:
        limits.append(spec.max_hours * hourly)
    return min(limits, default=None)

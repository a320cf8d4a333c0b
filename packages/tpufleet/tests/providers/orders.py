"""Orders as the controller sends them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.providers.base import Order

ZONE = "us-central1-a"


def order(
    *slices: str,
    accelerator: str = "v5litepod-16",
    zone: str = ZONE,
    capacity: Capacity = Capacity.SPOT,
    tokens: Sequence[str] | None = None,
    **more: Any,
) -> Order:
    names = tuple(SliceId(name) for name in slices)
    token_values = tokens or [f"token of {name}" for name in names]
    return Order(
        **{
            "id": f"order-{slices[0] if slices else 'none'}",
            "slices": names,
            "accelerator": accelerator,
            "zone": zone,
            "capacity": capacity,
            "tokens": dict(zip(names, token_values, strict=True)),
            "server_url": "http://10.0.0.1:8470",
            "fleet": "test",
            **more,
        }
    )

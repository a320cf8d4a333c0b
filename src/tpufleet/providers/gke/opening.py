"""The provider from settings: what `compose` calls when GKE is set up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpufleet.clocks import Clock
from tpufleet.kubernetes.connections import Connection
from tpufleet.providers.gke import settings
from tpufleet.providers.gke.provider import GkeProvider


def open_provider(written: Mapping[str, Any], *, fleet: str, clock: Clock) -> GkeProvider:
    given = settings.parse(written)
    provider = GkeProvider(
        Connection(Path(given.kubeconfig) if given.kubeconfig else None),
        given,
        fleet=fleet,
        zones=given.zones,
        clock=clock,
        most_slices=given.most_slices,
    )
    provider.start()
    return provider

"""TPU pools in zones that Google's list does not have for their type. Pure.

Not errors: Google adds zones, and grants single customers others.
"""

from __future__ import annotations

from tpufleet.model.tpu import topology, tpu_zones
from tpufleet_gke.environment.config.sections import Environment

MOST_NAMED = 4


def zone_warnings(environment: Environment) -> list[str]:
    found = []
    for name, pool in environment.tpu_pools.items():
        offered = tpu_zones.zones_of(topology.find(pool.type).name)
        chosen = [pool.zone] if pool.zone else list(environment.zones)
        if offered and not set(chosen) & set(offered):
            kind = topology.short_name(pool.type)
            near = [zone for zone in offered if zone.startswith(f"{environment.region}-")]
            named = ", ".join((near or list(offered))[:MOST_NAMED])
            found.append(
                f"tpu_pools.{name}: Google's list has no {kind} in {', '.join(chosen)}, but in "
                f"{named}: `tpu types --zones`"
            )
    return found

"""The order of heartbeats: by agent process and number, never by a clock."""

from __future__ import annotations

from tpufleet.model.fleet.agent_protocol import Heartbeat
from tpufleet.model.fleet.hosts import MAX_PAST_BOOTS, Host


def is_superseded(heartbeat: Heartbeat, host: Host) -> bool:
    """Whether the row is from a later heartbeat."""
    if heartbeat.boot == host.boot:
        return heartbeat.seq < host.heartbeat_seq
    return heartbeat.boot in host.past_boots


def past_boots(heartbeat: Heartbeat, before: Host | None) -> tuple[str, ...]:
    """Agent processes of this host that have been replaced. They never come back."""
    if before is None:
        return ()
    if before.boot in ("", heartbeat.boot):
        return before.past_boots
    return (before.boot, *before.past_boots)[:MAX_PAST_BOOTS]

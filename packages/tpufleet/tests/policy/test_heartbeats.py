"""The order of heartbeats: by agent process and number, never by a clock."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tpufleet.model.fleet.agent_protocol import Heartbeat
from tpufleet.model.fleet.hosts import MAX_PAST_BOOTS, Host
from tpufleet.policy.recovery import heartbeat_order

HOST = Host(id="s/0", slice_id="s", index=0, boot="now", heartbeat_seq=5, past_boots=("before",))
HEARTBEAT = Heartbeat(
    host_id="s/0", boot="now", at=datetime(1970, 1, 1, tzinfo=UTC), address="", coordinator_port=1
)


@pytest.mark.parametrize(
    ("boot", "seq", "superseded"),
    [
        ("now", 6, False),
        ("now", 5, False),
        ("now", 4, True),
        ("next", 1, False),
        ("before", 100, True),
    ],
    ids=["next", "again", "earlier", "new agent", "agent that was replaced"],
)
def test_heartbeats_are_ordered_by_agent_and_number(boot, seq, superseded):
    heartbeat = replace(HEARTBEAT, boot=boot, seq=seq)
    assert heartbeat_order.is_superseded(heartbeat, HOST) == superseded


def test_replaced_agents_are_remembered_up_to_a_limit():
    host = None
    for number in range(50):
        heartbeat = replace(HEARTBEAT, boot=f"boot-{number}")
        past = heartbeat_order.past_boots(heartbeat, host)
        host = replace(HOST, boot=heartbeat.boot, past_boots=past)
    assert host.past_boots == tuple(f"boot-{48 - age}" for age in range(MAX_PAST_BOOTS))

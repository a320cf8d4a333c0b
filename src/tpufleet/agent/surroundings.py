"""What an agent hands to each workload that it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tpufleet.agent.guard import Guard
from tpufleet.agent.settings import AgentSettings
from tpufleet.client.agents import AgentClient
from tpufleet.clocks import Clock


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    settings: AgentSettings
    base: Mapping[str, str]  # the agent's own environment
    own_path: str  # where the agent's own `python` is
    client: AgentClient
    guard: Guard
    clock: Clock
    changed: Callable[[], None]  # called when a phase changed

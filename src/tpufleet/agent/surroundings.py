"""What an agent hands to each workload that it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tpufleet.agent.guard import Watchdog
from tpufleet.agent.settings import AgentSettings
from tpufleet.client.agents import AgentClient
from tpufleet.clocks import Clock


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentContext:
    settings: AgentSettings
    base_env: Mapping[str, str]  # the agent's own environment
    agent_bin_dir: str  # where the agent's own `python` is
    client: AgentClient
    watchdog: Watchdog
    clock: Clock
    on_phase_change: Callable[[], None]  # called when a phase changed

"""The five rules: what follows when a slice is preempted, a connection lost, a device locked."""

from __future__ import annotations

from enum import StrEnum

from tpufleet.model.endings import EndReason
from tpufleet.model.jobs import Capacity, Rule


class Action(StrEnum):
    REAPPLY = "reapply"  # new slices, then go on from the last checkpoint
    RESUME = "resume"  # the same slices, from the last checkpoint
    RERUN = "rerun"  # the same slices, from the start
    PASS = "pass"  # leave it to a person


#                     preempted       connection lost  device busy
_TABLE: dict[Rule, tuple[Action, Action, Action]] = {
    Rule.PRE: (Action.REAPPLY, Action.RESUME, Action.PASS),
    Rule.PASS: (Action.PASS, Action.PASS, Action.PASS),
    Rule.REAPPLY: (Action.REAPPLY, Action.REAPPLY, Action.PASS),
    Rule.RERUN: (Action.REAPPLY, Action.RERUN, Action.PASS),
    Rule.RESUME: (Action.PASS, Action.RESUME, Action.PASS),
}
GOVERNED = (EndReason.PREEMPTED, EndReason.CONNECTION_LOST, EndReason.DEVICE_BUSY)


def action(rule: Rule, reason: EndReason) -> Action | None:
    """What the rule says; None for a reason that no rule governs."""
    return _TABLE[rule][GOVERNED.index(reason)] if reason in GOVERNED else None


def default_rule(capacity: Capacity) -> Rule:
    return Rule.PRE if capacity is Capacity.SPOT else Rule.PASS

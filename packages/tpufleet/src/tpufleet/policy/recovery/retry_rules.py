"""The retry rules: the action after a preemption, a lost connection or a busy device."""

from __future__ import annotations

from enum import StrEnum

from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import Rule


class RuleAction(StrEnum):
    REAPPLY = "reapply"  # new slices, from the last checkpoint
    RESUME = "resume"  # the same slices, from the last checkpoint
    RERUN = "rerun"  # the same slices, from the start
    PASS = "pass"  # fail the job


#                     preempted       connection lost  device busy
_TABLE: dict[Rule, tuple[RuleAction, RuleAction, RuleAction]] = {
    Rule.AUTO: (RuleAction.REAPPLY, RuleAction.RESUME, RuleAction.REAPPLY),
    Rule.PRE: (RuleAction.REAPPLY, RuleAction.RESUME, RuleAction.PASS),
    Rule.PASS: (RuleAction.PASS, RuleAction.PASS, RuleAction.PASS),
    Rule.REAPPLY: (RuleAction.REAPPLY, RuleAction.REAPPLY, RuleAction.PASS),
    Rule.RERUN: (RuleAction.REAPPLY, RuleAction.RERUN, RuleAction.PASS),
    Rule.RESUME: (RuleAction.PASS, RuleAction.RESUME, RuleAction.PASS),
}
GOVERNED_REASONS = (EndReason.PREEMPTED, EndReason.CONNECTION_LOST, EndReason.DEVICE_BUSY)


def rule_action(rule: Rule, reason: EndReason) -> RuleAction | None:
    """The action under a rule; None for a reason that no rule governs."""
    return _TABLE[rule][GOVERNED_REASONS.index(reason)] if reason in GOVERNED_REASONS else None

"""Why an attempt ended, from what every host and slice said. The first to fail decides.

A rank whose peer died reports a lost connection, often before anybody knows of the peer. So a
lost connection is believed only when nothing better explains the end, and a lost slice explains
everything that did not clearly fail long before it.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpufleet.model.attempts import Attempt
from tpufleet.model.end_reasons import END_REASONS, EndReason
from tpufleet.model.hosts import Exit, Host, Phase
from tpufleet.model.slices import LossReason, TpuSlice

# Sent from outside: a machine that shuts down sends these too, so they prove little.
_FOREIGN_SIGNALS = frozenset({signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGINT})
# A rank can die of a peer's loss this long before anybody knows of the loss. To mistake a failure
# for a loss costs one retry; to mistake a loss for a failure would charge the user for it.
LOSS_DETECTION_DELAY = timedelta(seconds=60)
_DECIDED_BY_US = frozenset(
    {EndReason.CANCELLED, EndReason.TIMEOUT, EndReason.SUPERSEDED, EndReason.HUNG}
)
_LOSSES = {
    LossReason.PREEMPTED: EndReason.PREEMPTED,
    LossReason.MAINTENANCE: EndReason.MAINTENANCE,
    LossReason.HOST_LOST: EndReason.HOST_LOST,
    LossReason.OUT_OF_MEMORY: EndReason.OUT_OF_HOST_MEMORY,
    LossReason.BOOT_FAILED: EndReason.HOST_LOST,
    LossReason.VANISHED: EndReason.HOST_LOST,
    LossReason.REFUSED: EndReason.HOST_LOST,
}


# What became of a slice: "slice X …".
LOSS_DESCRIPTIONS = {
    EndReason.PREEMPTED: "was preempted",
    EndReason.MAINTENANCE: "was taken for maintenance",
    EndReason.HOST_LOST: "lost a host",
    EndReason.OUT_OF_HOST_MEMORY: "ran out of memory on a host",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    reason: EndReason
    message: str
    failed_host: str | None = None  # the one that decided


def judge(attempt: Attempt, slices: Sequence[TpuSlice], hosts: Sequence[Host]) -> Verdict:
    """The root cause over all ranks. Called when every process is known to be gone."""
    exits = [
        (host, host.exit)
        for host in hosts
        if host.attempt_id == attempt.id and host.phase is Phase.EXITED and host.exit
    ]
    by_itself = [(host, exit) for host, exit in exits if not exit.stopped_by_agent]
    reported = {host.slice_id for host, _ in by_itself} == set(attempt.slices)
    if reported and len(by_itself) == len(hosts) and all(exit.clean for _, exit in by_itself):
        return Verdict(reason=EndReason.FINISHED, message="every process finished")
    if attempt.stop_reason in _DECIDED_BY_US:
        return Verdict(
            reason=attempt.stop_reason, message=END_REASONS[attempt.stop_reason].description
        )
    failures = sorted(
        ((host, exit) for host, exit in by_itself if not exit.clean),
        key=lambda pair: (pair[1].at, pair[0].slice_id, pair[0].index),
    )
    loss = _earliest_loss(attempt, slices)
    clear = [pair for pair in failures if _is_clear(pair[1])]
    if loss and not (clear and clear[0][1].at < loss[0] - LOSS_DETECTION_DELAY):
        return Verdict(reason=loss[1], message=loss[2])
    suspects = clear or [pair for pair in failures if _foreign(pair[1])] or failures
    if suspects:
        host, exit = suspects[0]
        return Verdict(
            reason=cause_of(exit), message=describe_exit(host, exit), failed_host=host.id
        )
    if attempt.stop_reason:
        return Verdict(
            reason=attempt.stop_reason, message=END_REASONS[attempt.stop_reason].description
        )
    return Verdict(
        reason=EndReason.HOST_LOST, message="an agent was restarted and its processes are gone"
    )


def cause_of(exit: Exit) -> EndReason:
    """What one exit says on its own."""
    if exit.oom_killed:
        return EndReason.OUT_OF_HOST_MEMORY
    if exit.evidence:
        return exit.evidence
    return EndReason.SETUP_FAILED if exit.during_setup else EndReason.USER_ERROR


def describe_exit(host: Host, exit: Exit) -> str:
    """ "host 2 failed first: exit status 1: ValueError: …"."""
    how = f"signal {exit.signal}" if exit.signal else f"exit status {exit.status}"
    step = " in setup" if exit.during_setup else ""
    line = f": {exit.log_line}" if exit.log_line else ""
    return f"host {host.index} of {host.slice_id} failed first{step}, {how}{line}"


def _earliest_loss(
    attempt: Attempt, slices: Sequence[TpuSlice]
) -> tuple[datetime, EndReason, str] | None:
    """When the first slice was lost, and the loss that explains most."""
    lost = [
        (tpu_slice.lost_at, _LOSSES[tpu_slice.loss], _told(tpu_slice))
        for tpu_slice in slices
        if tpu_slice.loss in _LOSSES and tpu_slice.lost_at
    ]
    known = {reason for _, reason, _ in lost}
    if attempt.stop_reason in LOSS_DESCRIPTIONS and attempt.stopping_at:
        # The slice that was lost may be gone, and forgotten, by now.
        unknown = attempt.stop_reason not in known
        words = f"a slice {LOSS_DESCRIPTIONS[attempt.stop_reason]}" if unknown else ""
        lost.append((attempt.stopping_at, attempt.stop_reason, words))
    if not lost:
        return None
    # Of slices lost together, a preemption explains more than a host that fell silent.
    _, reason, words = min(
        (item for item in lost if item[2]),
        key=lambda item: (item[1] is EndReason.HOST_LOST, item[0], item[2]),
    )
    return min(at for at, _, _ in lost), reason, words


def _told(tpu_slice: TpuSlice) -> str:
    detail = f": {tpu_slice.reason}" if tpu_slice.reason else ""
    return f"slice {tpu_slice.id} {LOSS_DESCRIPTIONS[_LOSSES[tpu_slice.loss]]}{detail}"


def _foreign(exit: Exit) -> bool:
    # A shell or a supervisor tells of its child's signal as an exit status above 128.
    number = exit.signal or (exit.status or 0) - 128
    return number in _FOREIGN_SIGNALS and not exit.oom_killed and exit.evidence is None


def _is_clear(exit: Exit) -> bool:
    """It failed by itself, and not because a peer did."""
    return cause_of(exit) is not EndReason.CONNECTION_LOST and not _foreign(exit)

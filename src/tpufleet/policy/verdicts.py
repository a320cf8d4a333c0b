"""Why an attempt ended, from what every host and slice said. The first to fail decides.

A rank whose peer died reports a lost connection, often before anybody knows of the peer. So a
lost connection is believed only when nothing better explains the end, and a lost slice explains
everything that did not clearly fail before it.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from tpufleet.model.attempts import Attempt
from tpufleet.model.endings import ENDINGS, EndReason
from tpufleet.model.hosts import Exit, Host, Phase
from tpufleet.model.slices import Loss, TpuSlice

# Sent from outside: a machine that shuts down sends these too, so they prove little.
_FOREIGN_SIGNALS = frozenset({signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGINT})
_DECIDED_BY_US = frozenset(
    {EndReason.CANCELLED, EndReason.TIMEOUT, EndReason.SUPERSEDED, EndReason.HUNG}
)
_LOSSES = {
    Loss.PREEMPTED: EndReason.PREEMPTED,
    Loss.MAINTENANCE: EndReason.MAINTENANCE,
    Loss.HOST_LOST: EndReason.HOST_LOST,
    Loss.BOOT_FAILED: EndReason.HOST_LOST,
    Loss.VANISHED: EndReason.HOST_LOST,
    Loss.REFUSED: EndReason.HOST_LOST,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    reason: EndReason
    words: str
    host: str | None = None  # the one that decided


def judge(attempt: Attempt, slices: Sequence[TpuSlice], hosts: Sequence[Host]) -> Verdict:
    """The root cause over all ranks. Called when every process is known to be gone."""
    exits = [
        (host, host.exit)
        for host in hosts
        if host.attempt_id == attempt.id and host.phase is Phase.EXITED and host.exit
    ]
    by_itself = [(host, exit) for host, exit in exits if not exit.stopped_by_us]
    if len(by_itself) == len(hosts) and all(exit.clean for _, exit in by_itself):
        return Verdict(reason=EndReason.FINISHED, words="every process finished")
    if attempt.stop_because in _DECIDED_BY_US:
        return Verdict(
            reason=attempt.stop_because, words=ENDINGS[attempt.stop_because].words
        )
    failures = sorted(
        ((host, exit) for host, exit in by_itself if not exit.clean), key=lambda pair: pair[1].at
    )
    loss = _earliest_loss(slices)
    clear = [pair for pair in failures if _is_clear(pair[1])]
    if loss and not (clear and clear[0][1].at < loss[0]):
        return Verdict(reason=loss[1], words=loss[2])
    suspects = clear or [pair for pair in failures if _foreign(pair[1])] or failures
    if suspects:
        host, exit = suspects[0]
        return Verdict(reason=cause_of(exit), words=describe(host, exit), host=host.id)
    if attempt.stop_because:
        return Verdict(
            reason=attempt.stop_because, words=ENDINGS[attempt.stop_because].words
        )
    return Verdict(
        reason=EndReason.HOST_LOST, words="an agent was restarted and its processes are gone"
    )


def cause_of(exit: Exit) -> EndReason:
    """What one exit says on its own."""
    if exit.oom_killed:
        return EndReason.OUT_OF_HOST_MEMORY
    if exit.evidence:
        return exit.evidence
    return EndReason.SETUP_FAILED if exit.during_setup else EndReason.USER_ERROR


def describe(host: Host, exit: Exit) -> str:
    """"host 2 failed first: exit status 1: ValueError: …"."""
    how = f"signal {exit.signal}" if exit.signal else f"exit status {exit.status}"
    step = " in setup" if exit.during_setup else ""
    line = f": {exit.line}" if exit.line else ""
    return f"host {host.index} of {host.slice_id} failed first{step}, {how}{line}"


def _earliest_loss(
    slices: Sequence[TpuSlice],
) -> tuple[datetime, EndReason, str] | None:
    lost = [
        (tpu_slice.lost_at, _LOSSES[tpu_slice.loss], tpu_slice)
        for tpu_slice in slices
        if tpu_slice.loss in _LOSSES and tpu_slice.lost_at
    ]
    if not lost:
        return None
    # Of slices lost together, a preemption explains more than a host that fell silent.
    at, reason, tpu_slice = min(lost, key=lambda item: (item[1] is EndReason.HOST_LOST, item[0]))
    detail = f": {tpu_slice.reason}" if tpu_slice.reason else ""
    return at, reason, f"slice {tpu_slice.id} {ENDINGS[reason].words}{detail}"


def _foreign(exit: Exit) -> bool:
    return exit.signal in _FOREIGN_SIGNALS and not exit.oom_killed and exit.evidence is None


def _is_clear(exit: Exit) -> bool:
    """It failed by itself, and not because a peer did."""
    return cause_of(exit) is not EndReason.CONNECTION_LOST and not _foreign(exit)

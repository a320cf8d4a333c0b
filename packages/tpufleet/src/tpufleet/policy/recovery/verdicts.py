"""Why an attempt ended, from the reports of every host and slice. The first failure decides.

A rank whose peer died reports a lost connection, often before the loss of the peer is known. So a
lost connection is the verdict only when nothing better explains the end, and a lost slice explains
every failure that did not clearly precede it.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from tpufleet.model.fleet.hosts import Exit, Host, Phase
from tpufleet.model.fleet.slices import LossReason, TpuSlice
from tpufleet.model.job.attempts import Attempt
from tpufleet.model.job.end_reasons import DATA_ERROR_STATUS, END_REASONS, EndReason

# Sent from outside the process. A machine that shuts down sends them too, so they prove little.
_EXTERNAL_SIGNALS = frozenset({signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGINT})
# A rank can die of a peer's loss this long before the loss is detected. Mistaking a failure for a
# loss costs one retry; mistaking a loss for a failure would charge the user for it.
LOSS_DETECTION_DELAY = timedelta(seconds=60)
_DECIDED_BY_CONTROLLER = frozenset(
    {EndReason.CANCELLED, EndReason.TIMEOUT, EndReason.SUPERSEDED, EndReason.HUNG}
)
END_REASON_OF_LOSS = {
    LossReason.PREEMPTED: EndReason.PREEMPTED,
    LossReason.MAINTENANCE: EndReason.MAINTENANCE,
    LossReason.HOST_LOST: EndReason.HOST_LOST,
    LossReason.OUT_OF_MEMORY: EndReason.OUT_OF_HOST_MEMORY,
    LossReason.BOOT_FAILED: EndReason.HOST_LOST,
    LossReason.VANISHED: EndReason.HOST_LOST,
    LossReason.REFUSED: EndReason.HOST_LOST,
}

# Completes "slice X …".
LOSS_DESCRIPTIONS = {
    EndReason.PREEMPTED: "was preempted",
    EndReason.MAINTENANCE: "went into maintenance",
    EndReason.HOST_LOST: "lost a host",
    EndReason.OUT_OF_HOST_MEMORY: "ran out of memory on a host",
}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    reason: EndReason
    message: str
    failed_host: str | None = None  # the one that decided


def judge(attempt: Attempt, slices: Sequence[TpuSlice], hosts: Sequence[Host]) -> Verdict:
    """The root cause over all ranks, once every process is known to be gone."""
    exits = [
        (host, host.exit)
        for host in hosts
        if host.attempt_id == attempt.id and host.phase is Phase.EXITED and host.exit
    ]
    own_exits = [(host, exit) for host, exit in exits if not exit.stopped_by_agent]
    # A program exits with status 0 only when its work is done, so it has finished also when a
    # notice came meanwhile. What people or limits stopped has not.
    unstopped = own_exits if attempt.stop_reason in _DECIDED_BY_CONTROLLER else exits
    all_slices = {host.slice_id for host, _ in unstopped} == set(attempt.slices)
    if all_slices and len(unstopped) == len(hosts) and all(exit.clean for _, exit in unstopped):
        return Verdict(reason=EndReason.FINISHED, message="all processes exited with status 0")
    asked = attempt.stop_reason
    stopped = Verdict(reason=asked, message=END_REASONS[asked].description) if asked else None
    if stopped and asked in _DECIDED_BY_CONTROLLER:
        return stopped
    loss, first = _earliest_loss(attempt, slices), first_failure(attempt, hosts)
    own_failure = first[1] if first and _is_own_failure(first[1]) else None
    if loss and not (own_failure and own_failure.at < loss[0] - LOSS_DETECTION_DELAY):
        return Verdict(reason=loss[1], message=loss[2])
    if first:
        host, exit = first
        return Verdict(
            reason=cause_of(exit), message=describe_exit(host, exit), failed_host=host.id
        )
    return stopped or Verdict(
        reason=EndReason.HOST_LOST, message="an agent restarted and its processes are gone"
    )


def first_failure(attempt: Attempt, hosts: Sequence[Host]) -> tuple[Host, Exit] | None:
    """The first process that failed by itself, else the first that was killed, else the first that
    lost a connection."""
    failures = [
        (host, host.exit)
        for host in hosts
        if host.attempt_id == attempt.id
        and host.phase is Phase.EXITED
        and host.exit
        and not (host.exit.clean or host.exit.stopped_by_agent)
    ]
    return min(
        failures,
        key=lambda pair: (
            not _is_own_failure(pair[1]),
            not _is_external(pair[1]),
            *(pair[1].at, pair[0].slice_id, pair[0].index),
        ),
        default=None,
    )


def cause_of(exit: Exit) -> EndReason:
    """The end reason of one exit on its own."""
    if exit.oom_killed:
        return EndReason.OUT_OF_HOST_MEMORY
    if exit.status == DATA_ERROR_STATUS and not exit.during_setup:
        return EndReason.DATA_ERROR
    if exit.evidence:
        return exit.evidence
    return EndReason.SETUP_FAILED if exit.during_setup else EndReason.USER_ERROR


def describe_exit(host: Host, exit: Exit) -> str:
    """`ValueError: … (exit status 1, host 2 of s-1)`: the error first, where tables are narrow. A
    last line that may say nothing of it comes last."""
    how = f"signal {exit.signal}" if exit.signal else f"exit status {exit.status}"
    setup = " during setup" if exit.during_setup else ""
    where = f"host {host.index} of {host.slice_id}{setup}"
    last = f"; last line: {exit.log_line}" if exit.log_line else ""
    if exit.signal and exit.evidence is None:  # the program had no time to say why
        return f"killed by {how} on {where}{last}"
    if exit.unexplained or not exit.log_line:
        return f"{how} on {where}{last}"
    return f"{exit.log_line} ({how}, {where})"


def _earliest_loss(
    attempt: Attempt, slices: Sequence[TpuSlice]
) -> tuple[datetime, EndReason, str] | None:
    """When the first slice was lost, with the reason and message of the loss that explains most."""
    lost: list[tuple[datetime, EndReason, str]] = []
    for tpu_slice in slices:
        reason = END_REASON_OF_LOSS.get(tpu_slice.loss) if tpu_slice.loss else None
        if reason is not None and tpu_slice.lost_at:
            lost.append((tpu_slice.lost_at, reason, _loss_message(tpu_slice, reason)))
    known = {reason for _, reason, _ in lost}
    if attempt.stop_reason in LOSS_DESCRIPTIONS and attempt.stopping_at:
        # The lost slice may have been deleted from the view by now.
        unknown = attempt.stop_reason not in known
        message = f"a slice {LOSS_DESCRIPTIONS[attempt.stop_reason]}" if unknown else ""
        lost.append((attempt.stopping_at, attempt.stop_reason, message))
    if not lost:
        return None
    # Of slices lost together, a preemption explains more than a host that stopped reporting.
    _, reason, message = min(
        (item for item in lost if item[2]),
        key=lambda item: (item[1] is EndReason.HOST_LOST, item[0], item[2]),
    )
    return min(at for at, _, _ in lost), reason, message


def _loss_message(tpu_slice: TpuSlice, reason: EndReason) -> str:
    # Some providers have no more to say than that it was preempted.
    detail = f": {tpu_slice.reason}" if tpu_slice.reason not in ("", reason) else ""
    return f"slice {tpu_slice.id} {LOSS_DESCRIPTIONS[reason]}{detail}"


def _is_external(exit: Exit) -> bool:
    # A shell reports its child's signal as an exit status above 128.
    number = exit.signal or (exit.status or 0) - 128
    return number in _EXTERNAL_SIGNALS and not exit.oom_killed and exit.evidence is None


def _is_own_failure(exit: Exit) -> bool:
    """It failed by itself, not because a peer did or because it was signalled."""
    return cause_of(exit) is not EndReason.CONNECTION_LOST and not _is_external(exit)

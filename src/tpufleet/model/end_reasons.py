"""Why an attempt can end: each reason with its meaning, and the budget that pays for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EndReason(StrEnum):
    FINISHED = "finished"
    USER_ERROR = "user_error"
    TIMEOUT = "timeout"
    OUT_OF_HBM = "out_of_hbm"
    OUT_OF_HOST_MEMORY = "out_of_host_memory"
    DISK_FULL = "disk_full"
    DEVICE_BUSY = "device_busy"
    CONNECTION_LOST = "connection_lost"
    SETUP_FAILED = "setup_failed"
    HUNG = "hung"
    HOST_LOST = "host_lost"
    PREEMPTED = "preempted"
    MAINTENANCE = "maintenance"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"


class Budget(StrEnum):
    """What a retry is charged to. The job's `retries` says how much of each there is."""

    NONE = "none"  # never retried
    FREE = "free"  # always retried
    FAILURE = "failure"
    SETUP = "setup"
    MEMORY = "memory"
    HANG = "hang"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, slots=True)
class EndReasonInfo:
    """What a reason means, in words, and who pays for the next try."""

    description: str
    detected_by: str
    budget: Budget
    advice: str = ""


END_REASONS: dict[EndReason, EndReasonInfo] = {
    EndReason.FINISHED: EndReasonInfo(
        "finished", "every process exited with status 0", Budget.NONE
    ),
    EndReason.USER_ERROR: EndReasonInfo(
        "the program failed",
        "a non-zero exit status or a signal that nothing else explains",
        Budget.FAILURE,
        "read `tpu logs JOB`, mend the code, then `tpu resume JOB` or submit again",
    ),
    EndReason.TIMEOUT: EndReasonInfo(
        "ran out of its time limit",
        "time spent running, over all attempts, passed `timeout`",
        Budget.NONE,
        "raise `timeout` and `tpu resume JOB`",
    ),
    EndReason.OUT_OF_HBM: EndReasonInfo(
        "out of device memory (HBM)",
        "exit with RESOURCE_EXHAUSTED and an HBM allocation in the last log lines",
        Budget.NONE,
        "use a smaller batch, more sharding or rematerialisation, or a larger slice",
    ),
    EndReason.OUT_OF_HOST_MEMORY: EndReasonInfo(
        "out of host memory",
        "killed by the kernel's out-of-memory killer, or MemoryError / bad_alloc at exit",
        Budget.MEMORY,
        "load less data per host, or use a type with more memory a host",
    ),
    EndReason.DISK_FULL: EndReasonInfo(
        "a disk is full",
        "exit with `No space left on device`",
        Budget.INFRASTRUCTURE,
        "write less, or to the checkpoint location instead of the host's disk",
    ),
    EndReason.DEVICE_BUSY: EndReasonInfo(
        "the TPU is busy or locked",
        "exit with `The TPU is already in use`, a libtpu lock or `Could not open any log file`",
        Budget.INFRASTRUCTURE,
        "another process holds the chips; `tpu resume JOB` after it is gone",
    ),
    EndReason.CONNECTION_LOST: EndReasonInfo(
        "the runtime lost its connection",
        "exit with gRPC UNAVAILABLE / DEADLINE_EXCEEDED or a coordination-service heartbeat error",
        Budget.INFRASTRUCTURE,
    ),
    EndReason.SETUP_FAILED: EndReasonInfo(
        "setup failed",
        "the setup command, the snapshot or a secret failed before the program started",
        Budget.SETUP,
        "read `tpu logs JOB`; the setup step runs on every host of every attempt",
    ),
    EndReason.HUNG: EndReasonInfo(
        "made no progress",
        "the program reported progress once, then none for `hung_after`",
        Budget.HANG,
        "read `tpu logs JOB`; raise `hung_after` if the program was only slow",
    ),
    EndReason.HOST_LOST: EndReasonInfo(
        "a host was lost", "no heartbeat, or the provider says it is gone", Budget.INFRASTRUCTURE
    ),
    EndReason.PREEMPTED: EndReasonInfo(
        "preempted", "a preemption notice, or the provider says so", Budget.FREE
    ),
    EndReason.MAINTENANCE: EndReasonInfo(
        "taken for maintenance", "a maintenance notice from the host", Budget.FREE
    ),
    EndReason.CANCELLED: EndReasonInfo("cancelled", "somebody asked for it", Budget.NONE),
    EndReason.SUPERSEDED: EndReasonInfo(
        "made way for a job of higher priority", "the placement decided so", Budget.FREE
    ),
}

"""Why an attempt can end: each reason with its meaning and the budget it is charged to."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class EndReason(StrEnum):
    FINISHED = "finished"
    USER_ERROR = "user_error"
    DATA_ERROR = "data_error"
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
    OVER_BUDGET = "over_budget"
    SUPERSEDED = "superseded"
    RESIZED = "resized"


# EX_DATAERR of sysexits.h: a program that exits with it is not run again.
DATA_ERROR_STATUS = 65


class RetryBudget(StrEnum):
    """What a retry is charged to. The job's `retries` says how much of each there is."""

    NONE = "none"  # never retried
    FREE = "free"  # always retried
    FAILURE = "failure"
    SETUP = "setup"
    MEMORY = "memory"
    HANG = "hang"
    INFRASTRUCTURE = "infrastructure"


class EndReasonInfo(msgspec.Struct, frozen=True):
    """The meaning of a reason, and the budget that a retry is charged to."""

    description: str
    detected_by: str
    budget: RetryBudget
    advice: str = ""


END_REASONS: dict[EndReason, EndReasonInfo] = {
    EndReason.FINISHED: EndReasonInfo(
        "finished", "all processes exited with status 0", RetryBudget.NONE
    ),
    EndReason.USER_ERROR: EndReasonInfo(
        "program error",
        "a non-zero exit status or a signal without another explanation",
        RetryBudget.FAILURE,
        "read `tpu logs JOB`, fix the program, then run `tpu resume JOB --new-code`",
    ),
    EndReason.DATA_ERROR: EndReasonInfo(
        "invalid input",
        f"exit status {DATA_ERROR_STATUS} (EX_DATAERR), by which a program says not to retry it",
        RetryBudget.NONE,
        "read `tpu logs JOB`, correct the input of the program, and submit it again",
    ),
    EndReason.TIMEOUT: EndReasonInfo(
        "time limit reached",
        "running time, summed over all attempts, exceeded `timeout`",
        RetryBudget.NONE,
        "run `tpu resume JOB --set timeout=…` with a larger `timeout`",
    ),
    EndReason.OUT_OF_HBM: EndReasonInfo(
        "out of device memory (HBM)",
        "exit with RESOURCE_EXHAUSTED and an HBM allocation in the last log lines",
        RetryBudget.NONE,
        "use a smaller batch, more sharding or rematerialisation, or a larger slice",
    ),
    EndReason.OUT_OF_HOST_MEMORY: EndReasonInfo(
        "out of host memory",
        "killed by the kernel's out-of-memory killer, or MemoryError / bad_alloc at exit",
        RetryBudget.MEMORY,
        "load less data per host, or use a type with more memory per host",
    ),
    EndReason.DISK_FULL: EndReasonInfo(
        "disk full",
        "exit with `No space left on device`",
        RetryBudget.INFRASTRUCTURE,
        "write less, or write to the checkpoint location instead of the host's disk",
    ),
    EndReason.DEVICE_BUSY: EndReasonInfo(
        "TPU busy or locked",
        "exit with `The TPU is already in use`, a libtpu lock or `Could not open any log file`",
        RetryBudget.INFRASTRUCTURE,
        "another process uses the chips; run `tpu resume JOB` after it has ended",
    ),
    EndReason.CONNECTION_LOST: EndReasonInfo(
        "connection between hosts lost",
        "exit with gRPC UNAVAILABLE / DEADLINE_EXCEEDED or a coordination-service heartbeat error",
        RetryBudget.INFRASTRUCTURE,
    ),
    EndReason.SETUP_FAILED: EndReasonInfo(
        "setup failed",
        "the setup command, the snapshot or a secret failed before the program started",
        RetryBudget.SETUP,
        "read `tpu logs JOB`; the setup step runs on every host of every attempt",
    ),
    EndReason.HUNG: EndReasonInfo(
        "no progress",
        "no progress, or output of a program that reports none, for `hung_after`",
        RetryBudget.HANG,
        "read `tpu logs JOB`; increase `hung_after` if the program was only slow",
    ),
    EndReason.HOST_LOST: EndReasonInfo(
        "host lost", "no heartbeat, or reported as lost by the provider", RetryBudget.INFRASTRUCTURE
    ),
    EndReason.PREEMPTED: EndReasonInfo(
        "preempted", "a preemption notice, or reported by the provider", RetryBudget.FREE
    ),
    EndReason.MAINTENANCE: EndReasonInfo(
        "host maintenance", "a maintenance notice from the host", RetryBudget.FREE
    ),
    EndReason.OVER_BUDGET: EndReasonInfo(
        "limit on cost reached",
        "`max_cost` or `max_hours` of the job, or the budget of its owner or pool",
        RetryBudget.NONE,
        "run `tpu resume JOB`, with `--set max_cost=…` or `--set max_hours=…` where that limit was "
        "reached; raise a budget first",
    ),
    EndReason.CANCELLED: EndReasonInfo("cancelled", "requested by a user", RetryBudget.NONE),
    EndReason.SUPERSEDED: EndReasonInfo(
        "superseded by a job of higher priority", "decided by placement", RetryBudget.FREE
    ),
    EndReason.RESIZED: EndReasonInfo(
        "restarted on more slices",
        "more slices of an elastic job were ready at a checkpoint",
        RetryBudget.FREE,
    ),
}

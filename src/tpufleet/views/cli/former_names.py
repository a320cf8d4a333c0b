"""Command names of the `tpu` job manager that this program replaces, and of earlier versions: what
each one means today. Only data, because `tpu --help` must respond at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Renamed:
    """Runs today's command, after a hint that names it."""

    arguments: tuple[str, ...]
    note: str = ""  # what is different


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Answers what to use instead."""

    reason: str
    instead: str


def _renamed(line: str, note: str = "") -> Renamed:
    return Renamed(tuple(line.split()), note)


_LIST = _renamed("jobs", "`tpu logs -f JOB` follows one")
_CANCEL = _renamed("cancel", "pass a job instead of a window number")
_ARCHIVE = "nothing is deleted; `tpu purge` deletes files"
_NO_FOLDERS = Unsupported(
    "working directories have no numbers",
    "change to the folder and use `tpu run`, or pass --workdir FOLDER",
)
_NO_SETTINGS = Unsupported(
    "there are no settings per user on the server",
    "set TPUFLEET_SERVER or edit ~/.config/tpufleet/config.yaml; options are in `tpu jobs --help`",
)
_NO_WINDOWS = Unsupported("jobs have ids and names instead of windows", "`tpu jobs` lists them")
_NO_CONFIG_ALIASES = Unsupported(
    "arguments reach your program as you write them",
    "`tpu run v5e-16 -- python train.py lr=0.01`, or `tpu rerun JOB lr=0.02`",
)
_NO_TPU_ALIASES = Unsupported(
    "a job gets its slices by type, or from a pool", "`tpu slices` lists slices, `tpu jobs` jobs"
)
_NO_REGISTRY = Unsupported(
    "slices are recorded when they are requested, not registered by hand",
    "`tpu pool create lab v5e-16 --largest 4` keeps slices for a group",
)
_NO_RESERVATIONS = Unsupported(
    "a slice is held by the job that runs on it, and freed when the job ends",
    "`tpu pool create lab v5e-16 --largest 4 --member USER` keeps slices for a group",
)
_NO_SHEET = Unsupported(
    "there is no spreadsheet to update: state and owner are observed",
    "`tpu slices --json` and `tpu jobs --all-users --json`",
)
_NO_CALLBACKS = Unsupported(
    "agents report start, progress and end of a job", "remove this line from your script"
)
_NO_COPIES = Unsupported(
    "a resumed job reads its checkpoints from where they are",
    "`tpu resume JOB`; to copy files, use gcloud storage cp",
)
_NO_CHECKPOINT_CLEANUP = Unsupported(
    "checkpoints are deleted by job, after a confirmation",
    "`tpu purge --older-than 90d --checkpoints --dry-run`",
)
_NO_LOCKS = Unsupported(
    "there is no lock to hold: every change is one transaction", "nothing; run your command"
)
_NO_MONITOR = Unsupported(
    "there is no MONITOR process: the control plane reacts when something happens",
    "`tpu events` shows what it did, `tpu rules` how it reacts",
)

FORMER_NAMES: dict[str, Renamed | Unsupported] = {
    # Earlier versions of this program.
    "check-rules": _renamed("rules"),
    # Run and observe.
    "check-simp": _LIST,
    "monitor": _renamed("jobs --watch"),
    "caj": _renamed("jobs --all-users"),
    "maj": _renamed("jobs --all-users --watch"),
    "add-tag": Unsupported(
        "tags are set when a job is created",
        "`tpu run v5e-16 --tag TAG -- CMD`, or `tpu rerun JOB --tag TAG`",
    ),
    "kill": _CANCEL,
    "kill-job": _CANCEL,
    "-k": _CANCEL,
    "-kj": _CANCEL,
    "kill-window": _CANCEL,
    "-kw": _CANCEL,
    "kill-remote": Unsupported(
        "processes belong to a job, and end with it", "`tpu cancel JOB`; `tpu slices` shows the job"
    ),
    "ignore-error": Unsupported(
        "the state of a job follows from its processes and cannot be edited",
        "`tpu why JOB` explains it, `tpu resume JOB` continues",
    ),
    "get-stage-dir": _renamed("show", "the code is a snapshot on the server"),
    "ack": Unsupported("failures are noticed at once", "`tpu why JOB` explains what happens next"),
    "clean": _renamed("archive", _ARCHIVE),
    "clear": _renamed("archive", _ARCHIVE),
    "clear-all": _renamed("archive", _ARCHIVE),
    "clear-finished": _renamed("archive --state succeeded", _ARCHIVE),
    "clear-error": _renamed("archive --state failed", _ARCHIVE),
    "-czw": _NO_WINDOWS,
    "-czj": _NO_WINDOWS,
    "change-ip": Unsupported(
        "jobs continue when the control plane restarts or moves", "`tpu serve`"
    ),
    # Directories.
    "set-cur": _NO_FOLDERS,
    "set-dir": _NO_FOLDERS,
    "del-dir": _NO_FOLDERS,
    "swap-dir": _NO_FOLDERS,
    "ls": _NO_FOLDERS,
    "lsdir": _NO_FOLDERS,
    "get-dir": _NO_FOLDERS,
    # Settings.
    "get-settings": _NO_SETTINGS,
    "set-settings": _NO_SETTINGS,
    "reset-settings": _NO_SETTINGS,
    "reset-window-num": _NO_WINDOWS,
    "reset-window": _NO_WINDOWS,
    # Config aliases.
    "-a": _NO_CONFIG_ALIASES,
    "-alias": _NO_CONFIG_ALIASES,
    "add-config-alias": _NO_CONFIG_ALIASES,
    "-sa": _NO_CONFIG_ALIASES,
    "-la": _NO_CONFIG_ALIASES,
    "show-config-alias": _NO_CONFIG_ALIASES,
    "del-config-alias": _NO_CONFIG_ALIASES,
    # Nodes.
    "applyy": _renamed("apply"),
    "reapplyy": _renamed("reapply"),
    "apply-norm": _renamed("apply -norm"),
    "reapply-norm": _renamed("reapply -norm"),
    "-cktpu": _renamed("check-status"),
    "-dtpu": _renamed("describe"),
    "mount-disk-new": _renamed("mount-disk"),
    "solve-env": _renamed("solve"),
    # Registry.
    "-ta": _NO_TPU_ALIASES,
    "-ata": _NO_TPU_ALIASES,
    "add-tpu-alias": _NO_TPU_ALIASES,
    "-lta": _NO_TPU_ALIASES,
    "-sta": _NO_TPU_ALIASES,
    "register": _NO_REGISTRY,
    "add-applied-tpu": _NO_REGISTRY,
    "add-applied": _NO_REGISTRY,
    "-atpu": _NO_REGISTRY,
    "del-registered": _NO_REGISTRY,
    "del-register": _NO_REGISTRY,
    "del-reg": _NO_REGISTRY,
    "del-info": _NO_REGISTRY,
    "rtw": _NO_REGISTRY,
    "fang": _NO_REGISTRY,
    "fmd": _NO_REGISTRY,
    "keng": _renamed("stock", "it shows where capacity was granted and refused"),
    "zhan": _NO_RESERVATIONS,
    "rm-lock": _NO_RESERVATIONS,
    # Sheet.
    "find": _renamed("slices"),
    "rel": _NO_RESERVATIONS,
    "release": _NO_RESERVATIONS,
    "ssn": Unsupported(
        "notes are set when a job is created", "`tpu run v5e-16 --note TEXT -- CMD`"
    ),
    "asn": Unsupported(
        "notes are set when a job is created", "`tpu run v5e-16 --note TEXT -- CMD`"
    ),
    "uss": _NO_SHEET,
    "upd-status-spreadsheet": _NO_SHEET,
    "gtis": _NO_SHEET,
    "twsi": _NO_SHEET,
    # Queue.
    "queue": _renamed("run --detach", "a job waits for capacity by itself"),
    "vq": _renamed("jobs --all-users --state queued --state waiting"),
    "dequeue": _CANCEL,
    "dq": _CANCEL,
    "dqr": Unsupported(
        "jobs start by themselves, in the order of the queue",
        "`tpu why JOB` says what it waits for; `tpu rerun JOB --type TYPE` uses another type",
    ),
    # Script callbacks.
    "upd-log": _NO_CALLBACKS,
    "upd-staging-info": _NO_CALLBACKS,
    "finish-job": _NO_CALLBACKS,
    "fail-job": _NO_CALLBACKS,
    # Buckets.
    "cp": _NO_COPIES,
    "cc": _NO_COPIES,
    "cca": _NO_COPIES,
    "clean-eu": _NO_CHECKPOINT_CLEANUP,
    "clean-us": _NO_CHECKPOINT_CLEANUP,
    # Users and administration.
    "add-user": _renamed("user add"),
    "del-user": _renamed("user delete"),
    "list-users": _renamed("user list"),
    "-lu": _renamed("user list"),
    "register-web": _renamed("token create", "a token replaces the password"),
    "lock": _NO_LOCKS,
    "unlock": _NO_LOCKS,
    "rl": _NO_LOCKS,
    "lock-data": _NO_LOCKS,
    "unlock-data": _NO_LOCKS,
    "-smc": _NO_MONITOR,
    "-gmc": _NO_MONITOR,
    "-agc": _NO_MONITOR,
    "-mgc": _NO_MONITOR,
    "-Ml": _renamed("events", "there is no MONITOR process"),
    "-Mc": _NO_MONITOR,
    "debug-stats": _NO_MONITOR,
    "debug-kill": _NO_MONITOR,
    "tldr": _renamed("--help"),
}

# They stop, delete or rebuild something, so a misspelling must never lead to one of them.
DESTRUCTIVE = frozenset(
    {"cancel", "delete", "reapply", "restart", "purge", "archive", "fault", "solve", "mount-disk"}
)

"""Command names of the `tpu` job manager that this program replaces: what each one means today.
Only data, because every command waits for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Renamed(NamedTuple):
    """Runs today's command, after a hint that names it."""

    arguments: tuple[str, ...]
    note: str = ""  # what is different


class Unsupported(NamedTuple):
    """Answers what to use instead."""

    reason: str
    instead: str


def _renamed(line: str, note: str = "") -> Renamed:
    return Renamed(tuple(line.split()), note)


_LIST = _renamed("jobs", "`tpu logs -f JOB` follows one")
_CANCEL = _renamed("cancel", "pass a job instead of a window number")
_ARCHIVE = "nothing is deleted; `tpu archive purge` deletes files"
_NO_WINDOWS = Unsupported("jobs have ids and names instead of windows", "`tpu jobs` lists them")
_ADOPT = _renamed("adopt", "pass --pool; the node keeps its name")
_UNREGISTER = _renamed("adopt undo", "the node is not deleted")
_NO_SLOTS = Unsupported(
    "an alias leads to a slice, not to a slot that nodes take turns in",
    "`tpu adopt NODE --pool POOL`, then `tpu inventory set NODE --alias ALIAS`",
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
    "`tpu archive purge --older-than 90d --checkpoints --dry-run`",
)
_NO_LOCKS = Unsupported(
    "there is no lock to hold: every change is one transaction", "nothing; run your command"
)
_NO_MONITOR = Unsupported(
    "there is no MONITOR process: the control plane reacts when something happens",
    "`tpu events` shows what it did, `tpu config rules` how it reacts",
)

_RUN = "`tpu run` runs a command, `tpu submit` a job file"
_JOBS = "`tpu jobs` lists jobs, `tpu queue` those that wait"
_SHOW = "`tpu show JOB` prints all about a job"
_FOLLOW = "`tpu logs -f JOB` follows a job until it ends"
_STOP = "`tpu cancel JOB` ends a job, `tpu serve --stop` the server of this machine"
_PAUSE = (
    "`tpu queue hold JOB` keeps back one that waits; `tpu cancel JOB` stops one that runs, and "
    "`tpu resume JOB` continues it from its checkpoint"
)
# What people type who know other schedulers. Nothing is run for them.
FOREIGN_NAMES: dict[str, str] = {
    **dict.fromkeys(("create", "launch", "sbatch", "srun", "start"), _RUN),
    **dict.fromkeys(("list", "ps", "sinfo", "squeue"), _JOBS),
    **dict.fromkeys(("get", "info", "inspect", "sacct"), _SHOW),
    **dict.fromkeys(("attach", "follow", "tail", "wait", "watch"), _FOLLOW),
    **dict.fromkeys(("abort", "down", "scancel", "stop", "terminate"), _STOP),
    **dict.fromkeys(("pause", "suspend"), _PAUSE),
    "login": "write your token to a file of mode 600 and set TPUFLEET_TOKEN_FILE to it",
}

FORMER_NAMES: dict[str, Renamed | Unsupported] = {
    # Run and observe.
    "check-rules": _renamed("config rules"),
    "check-simp": _LIST,
    "monitor": _renamed("jobs --watch"),
    "caj": _renamed("jobs --all-users"),
    "maj": _renamed("jobs --all-users --watch"),
    "add-tag": _renamed("edit --tag", "pass a job instead of a window number"),
    "kill": _CANCEL,
    "kill-job": _CANCEL,
    "-k": _CANCEL,
    "-kj": _CANCEL,
    "kill-window": _CANCEL,
    "-kw": _CANCEL,
    "kill-remote": Unsupported(
        "processes belong to a job, and end with it",
        "`tpu cancel JOB`; `tpu inventory slices` shows the job",
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
    "set-cur": _renamed("config dir here"),
    "set-dir": _renamed("config dir set"),
    "del-dir": _renamed("config dir delete"),
    "swap-dir": _renamed("config dir swap"),
    "ls": _renamed("config dir"),
    "lsdir": _renamed("config dir"),
    "get-dir": _renamed("config dir get"),
    # Settings.
    "get-settings": _renamed("config"),
    "set-settings": _renamed("config set"),
    "reset-settings": _renamed("config reset"),
    "reset-window-num": _NO_WINDOWS,
    "reset-window": _NO_WINDOWS,
    # Config aliases.
    "-a": _renamed("config alias set"),
    "-alias": _renamed("config alias set"),
    "add-config-alias": _renamed("config alias set"),
    "-sa": _renamed("config alias"),
    "-la": _renamed("config alias"),
    "show-config-alias": _renamed("config alias"),
    "del-config-alias": _renamed("config alias delete"),
    # Nodes.
    "fleet": _renamed("vm fleet"),
    "apply": _renamed("vm apply"),
    "reapply": _renamed("vm apply --replace"),
    "applyy": _renamed("vm apply"),
    "reapplyy": _renamed("vm apply --replace"),
    "apply-norm": _renamed("vm apply -norm"),
    "reapply-norm": _renamed("vm apply --replace -norm"),
    "delete": _renamed(
        "vm delete", "for a job: `tpu cancel JOB`, then `tpu archive purge JOB` for its files"
    ),
    "restart": _renamed("vm restart"),
    "check-status": _renamed("vm status"),
    "-cktpu": _renamed("vm status"),
    "describe": _renamed("vm describe"),
    "-dtpu": _renamed("vm describe"),
    "check-env": _renamed("vm check-env"),
    "mount-disk": _renamed("vm mount-disk"),
    "mount-disk-new": _renamed("vm mount-disk"),
    "set-wandb": _renamed("vm set-wandb"),
    "solve": _renamed("vm repair"),
    "solve-env": _renamed("vm repair"),
    "test": _renamed("vm shell"),
    "lian": _renamed("vm ssh"),
    # Registry.
    "-ta": _renamed("config alias set"),
    "-ata": _renamed("config alias set"),
    "add-tpu-alias": _renamed("config alias set"),
    "-lta": _renamed("config alias"),
    "-sta": _renamed("config alias"),
    "register": _ADOPT,
    "add-applied-tpu": _ADOPT,
    "add-applied": _ADOPT,
    "-atpu": _ADOPT,
    "del-registered": _UNREGISTER,
    "del-register": _UNREGISTER,
    "del-reg": _UNREGISTER,
    "del-info": _UNREGISTER,
    "rtw": _ADOPT,
    "fang": _NO_SLOTS,
    "fmd": _NO_SLOTS,
    "keng": _renamed("types stock", "it shows where capacity was granted and refused"),
    "zhan": _renamed("reserve", "pass a pool"),
    "rm-lock": _renamed("reserve end"),
    # Sheet.
    "rel": _renamed("reserve end"),
    "ssn": _renamed("edit --note", "notes belong to a job"),
    "asn": _renamed("edit --note --append", "notes belong to a job"),
    "uss": _renamed("inventory", "state and owner are observed"),
    "upd-status-spreadsheet": _renamed("inventory", "state and owner are observed"),
    "gtis": _renamed("inventory", "state and owner are observed"),
    "twsi": _renamed("inventory", "state and owner are observed"),
    # Queue.
    "vq": _renamed("queue"),
    "dequeue": _renamed("cancel --waiting"),
    "dq": _renamed("cancel --waiting"),
    "dqr": _renamed("queue run-now", "it runs where it fits first"),
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
}

# Verbs that listed jobs: `tpu monitor ada -wdt col=3`.
LISTINGS = frozenset({"check", "check-simp", "monitor", "caj", "maj"})
_LAYOUT = re.compile(r"-[wdts]+|-nt|-nf|-c|col=\d+")
_VERBOSE = re.compile(r"-[wdts]*v[wdts]*")


def listing_arguments(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """What `tpu jobs` gets, and hints: a user is a query today, and the layout follows from the
    width of the terminal. Of the letters only `v` has a meaning."""
    kept: list[str] = []
    hints: list[str] = []
    for word in args:
        if _VERBOSE.fullmatch(word):
            kept.append("--verbose")
            word = word.replace("v", "")
        if word == "-":
            continue
        if _LAYOUT.fullmatch(word):
            hints.append(f"{word} is not needed: columns follow from the width of the terminal")
        elif word.startswith("-"):
            kept.append(word)
        else:
            kept.append(f"owner:{word.rpartition('=')[2]}" if _is_user(word) else word)
    return kept, hints


def _is_user(word: str) -> bool:
    return word.startswith("user=") or re.fullmatch(r"[A-Za-z][\w.-]*", word) is not None


# Flags of former verbs that are not needed any more, and why.
DROPPED_FLAGS = {
    "-re": "a chain of resumed jobs is hidden or kept by the state of its last job",
}
# Words that only these verbs had: dropped with a reason, or replaced.
DROPPED_WORDS = {
    "find": {
        **dict.fromkeys(
            ("style=full", "style=category", "style=category_note"),
            "the table follows from the terminal",
        ),
        "-del": "slices that are gone are not listed",
    },
    "-Ml": dict.fromkeys(("us", "cn"), "times are shown in the time zone of `tpu config`"),
}
REPLACED_WORDS = {
    "dequeue": {"*": "--all"},
    "dq": {"*": "--all"},
    "find": {"-n": "on-demand", "-p": "spot"},
}
# `tpu queue v4-32 …` submitted a job.
QUEUED_TYPE = re.compile(r"(.*\b)?v(\d\w*|\*)[\w+*-]*")

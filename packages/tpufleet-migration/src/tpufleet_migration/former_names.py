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


# What people type who know other schedulers. Nothing is run for them.
_FOREIGN = {
    "create|launch|sbatch|srun|start": "`tpu run` runs a command, `tpu submit` a job file",
    "list|ps|sinfo|squeue": "`tpu jobs` lists jobs, `tpu queue` those that wait",
    "get|info|inspect|sacct": "`tpu show JOB` prints all about a job",
    "attach|follow|tail|wait|watch": "`tpu logs -f JOB` follows a job until it ends",
    "abort|down|scancel|stop|terminate": (
        "`tpu cancel JOB` ends a job, `tpu serve --stop` the server of this machine"
    ),
    "pause|suspend": (
        "`tpu queue hold JOB` keeps back one that waits; `tpu cancel JOB` stops one that runs, and "
        "`tpu resume JOB` continues it from its checkpoint"
    ),
    "login": "write your token to a file of mode 600 and set TPUFLEET_TOKEN_FILE to it",
}
FOREIGN_NAMES = {name: hint for names, hint in _FOREIGN.items() for name in names.split("|")}

_ARCHIVE = "nothing is deleted; `tpu archive purge` deletes files"
_OF_JOB = "pass a job"
_FORMER: dict[str, Renamed | Unsupported] = {
    # Run and observe.
    "check-rules": _renamed("config rules"),
    "check-simp": _renamed("jobs"),
    "monitor": _renamed("jobs --watch"),
    "caj": _renamed("jobs --all-users"),
    "maj": _renamed("jobs --all-users --watch"),
    "add-tag": _renamed("edit --tag", _OF_JOB),
    "kill|kill-job|-k|-kj|kill-window|-kw": _renamed("cancel", _OF_JOB),
    "kill-remote": Unsupported(
        "processes belong to a job, and end with it",
        "`tpu cancel JOB`; `tpu inventory slices` shows the job",
    ),
    "ignore-error|ack": Unsupported(
        "the state of a job follows from its processes",
        "`tpu why JOB` explains it, `tpu resume JOB` continues",
    ),
    "get-stage-dir": _renamed("show"),
    "clean|clear|clear-all": _renamed("archive --yes", _ARCHIVE),
    "clear-finished": _renamed("archive --query state:succeeded", _ARCHIVE),
    "clear-error": _renamed("archive --query state:failed", _ARCHIVE),
    "-czw|-czj|reset-window-num|reset-window": Unsupported(
        "jobs have ids and names instead of windows", "`tpu jobs` lists them"
    ),
    "change-ip": Unsupported("jobs continue when the server restarts or moves", "`tpu serve`"),
    # Directories, settings, aliases.
    "set-cur": _renamed("config dir here"),
    "set-dir": _renamed("config dir set"),
    "del-dir": _renamed("config dir delete"),
    "swap-dir": _renamed("config dir swap"),
    "ls|lsdir": _renamed("config dir"),
    "get-dir": _renamed("config dir get"),
    "get-settings": _renamed("config"),
    "set-settings": _renamed("config set"),
    "reset-settings": _renamed("config reset"),
    "-a|-alias|add-config-alias|-ta|-ata|add-tpu-alias": _renamed("config alias set"),
    "-sa|-la|show-config-alias|-lta|-sta": _renamed("config alias"),
    "del-config-alias": _renamed("config alias delete"),
    # Nodes.
    "fleet": _renamed("vm fleet"),
    **{
        names: _renamed(f"vm apply {options} --autostop none")
        for names, options in {
            "apply|applyy": "",
            "reapply|reapplyy": "--replace",
            "apply-norm": "-norm",
            "reapply-norm": "--replace -norm",
        }.items()
    },
    "delete": _renamed(
        "vm delete", "for a job: `tpu cancel JOB`, then `tpu archive purge JOB` for its files"
    ),
    "restart": _renamed("vm restart"),
    "check-status|-cktpu": _renamed("vm status"),
    "describe|-dtpu": _renamed("vm describe"),
    "check-env": _renamed("vm check-env"),
    "mount-disk|mount-disk-new": _renamed("vm mount-disk"),
    "set-wandb": _renamed("vm set-wandb"),
    "solve|solve-env": _renamed("vm repair"),
    "test": _renamed("vm shell"),
    "lian": _renamed("vm ssh"),
    # Registry and sheet.
    "register|add-applied-tpu|add-applied|-atpu|rtw": _renamed("adopt", "pass --pool"),
    "del-registered|del-register|del-reg|del-info": _renamed(
        "adopt undo", "the TPU VM is not deleted"
    ),
    "fang|fmd": Unsupported(
        "an alias leads to a slice, not to a slot that TPU VMs take turns in",
        "`tpu adopt NODE --pool POOL`, then `tpu inventory set NODE --alias ALIAS`",
    ),
    "keng": _renamed("types stock"),
    "zhan": _renamed("reserve", "pass a pool"),
    "rm-lock|rel": _renamed("reserve end"),
    "ssn": _renamed("edit --note", _OF_JOB),
    "asn": _renamed("edit --note --append", _OF_JOB),
    "uss|upd-status-spreadsheet|gtis|twsi": _renamed("inventory"),
    # Queue, and callbacks of scripts.
    "vq": _renamed("queue"),
    "dequeue|dq": _renamed("cancel --waiting"),
    "dqr": _renamed("queue run-now"),
    "upd-log|upd-staging-info|finish-job|fail-job": Unsupported(
        "agents report start, progress and end of a job", "remove this line from your script"
    ),
    # Buckets.
    "cp|cc|cca": Unsupported(
        "a resumed job reads its checkpoints from where they are",
        "`tpu resume JOB`; to copy files, use gcloud storage cp",
    ),
    "clean-eu|clean-us": Unsupported(
        "checkpoints are deleted by job, after a confirmation",
        "`tpu archive purge --query until:90d --checkpoints --dry-run`",
    ),
    # Users and administration.
    "add-user": _renamed("user add"),
    "del-user": _renamed("user delete"),
    "list-users|-lu": _renamed("user list"),
    "register-web": _renamed("token create"),
    "lock|unlock|rl|lock-data|unlock-data": Unsupported(
        "there is no lock to hold: every change is one transaction", "nothing; run your command"
    ),
    "-Ml": _renamed("events"),
    "-smc|-gmc|-agc|-mgc|-Mc|debug-stats|debug-kill": Unsupported(
        "there is no MONITOR process: the server reacts when something happens",
        "`tpu events` shows what it did, `tpu config rules` how it reacts",
    ),
}
FORMER_NAMES = {name: meaning for names, meaning in _FORMER.items() for name in names.split("|")}

# Verbs that listed jobs: `tpu monitor ada -wdt col=3`.
LISTINGS = frozenset({"check", "check-simp", "monitor", "caj", "maj"})
_LAYOUT = re.compile(r"-[wdts]+|-nt|-nf|-c|col=\d+")
_VERBOSE = re.compile(r"-[wdts]*v[wdts]*")


def listing_arguments(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """What `tpu jobs` gets, and what is dropped: a user is a query today, and the layout follows
    from the width of the terminal. Of the letters only `v` has a meaning."""
    kept: list[str] = []
    dropped: list[str] = []
    for word in args:
        if _VERBOSE.fullmatch(word):
            kept.append("--verbose")
            word = word.replace("v", "")
        if word == "-":
            continue
        if _LAYOUT.fullmatch(word):
            dropped.append(word)
        elif word.startswith("-"):
            kept.append(word)
        else:
            kept.append(f"owner:{word.rpartition('=')[2]}" if _is_user(word) else word)
    return kept, dropped


def _is_user(word: str) -> bool:
    return word.startswith("user=") or re.fullmatch(r"[A-Za-z][\w.-]*", word) is not None


LAYOUT = "columns follow from the width of the terminal"
# Flags of former verbs that are not needed any more, and why.
DROPPED_FLAGS = {
    "-re": "a chain of resumed jobs is hidden or kept by the state of its last job",
}
# Words that only these verbs had: dropped with a reason, or replaced.
DROPPED_WORDS = {
    "find": {
        **dict.fromkeys(("style=full", "style=category", "style=category_note"), LAYOUT),
        "-del": "slices that are gone are not listed",
    },
    "-Ml": dict.fromkeys(("us", "cn"), "times are shown in the time zone of `tpu config`"),
}
REPLACED_WORDS = {
    "dequeue": {"*": "--all"},
    "dq": {"*": "--all"},
    "find": {"-n": "on-demand", "-p": "spot"},
}


def generations(word: str) -> list[str]:
    """`v234` of `find` is `v2 v3 v4`."""
    several = re.fullmatch(r"v([2-9]{2,})", word)
    return [word] if several is None else [f"v{digit}" for digit in several[1]]


# `tpu queue v4-32 …` submitted a job.
QUEUED_TYPE = re.compile(r"(.*\b)?v(\d\w*|\*)[\w+*-]*")

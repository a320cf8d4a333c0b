"""Arguments of the job manager that this program replaces which need the server to be understood: a
user among the words, and a job or an alias after a verb of nodes. Imported only for its verbs."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tpufleet.errors import FleetError
from tpufleet.model.tpu import type_lookup
from tpufleet.views.cli import connection
from tpufleet.views.cli.registry import HintedUsageError
from tpufleet_migration import former_notes
from tpufleet_migration.former_flags import (
    OWN_NAME,
    hint,
    is_former,
    not_needed,
    options_with_value,
)

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient

# How many words each verb has without a user; the words after them may be one.
OF_JOBS = {
    "add-tag": 2, "kill": 1, "kill-job": 1, "-k": 1, "-kj": 1, "kill-window": 1, "-kw": 1,
    "get-stage-dir": 1, "dequeue": 1, "dq": 1, "resume": 1, "rerun": 1,
}  # fmt: skip
_OF_MINE = {
    "clean": 0, "clear": 0, "clear-all": 0, "clear-finished": 0, "clear-error": 0, "set-cur": 1,
    "set-dir": 2, "del-dir": 1, "swap-dir": 2, "ls": 0, "lsdir": 0, "get-dir": 1,
    "get-settings": 0, "set-settings": 2, "reset-settings": 0, "-a": 2, "-alias": 2,
    "add-config-alias": 2, "-sa": 0, "-la": 0, "show-config-alias": 0, "del-config-alias": 1,
    "-ta": 2, "-ata": 2, "add-tpu-alias": 2, "-lta": 0, "-sta": 0, "zhan": 1, "rm-lock": 1,
    "rel": 1, "release": 1,
}  # fmt: skip
_LISTING = {"vq": 0}
OF_RESERVATIONS = ("rel", "release", "rm-lock")
WITH_USER = {**OF_JOBS, **_OF_MINE, **_LISTING, "run": 1}
# What a person means who names a job.
_STATE = (
    "`tpu show {job}` has all about it, `tpu why {job}` explains its state, `tpu doctor {job}` "
    "checks its hosts"
)
_SLICES = (
    "its slices are requested and replaced without you; `tpu why {job}` says why it waits, and "
    "`tpu resume {job}` continues it after its end"
)
_COMMAND = "`tpu exec {job} -- COMMAND` runs a command on its hosts"
OF_NODES = {
    "delete": "`tpu cancel {job}` stops it; when it has ended, `tpu archive {job}` hides it and "
    "`tpu archive purge {job}` deletes its logs, results and code",
    "restart": "`tpu resume {job}` continues it from its checkpoint, `tpu rerun {job}` starts it "
    "from the beginning",
    **dict.fromkeys(
        ("apply", "applyy", "apply-norm", "reapply", "reapplyy", "reapply-norm"), _SLICES
    ),
    **dict.fromkeys(("describe", "-dtpu", "check-status", "-cktpu", "check-env"), _STATE),
    **dict.fromkeys(("solve", "solve-env"), _STATE),
    **dict.fromkeys(("lian", "test", "mount-disk", "mount-disk-new", "set-wandb"), _COMMAND),
}
_NAME = re.compile(r"[A-Za-z][\w.-]*")
_EXPLICIT = re.compile(r"(user|id)=(.*)")


class _Server:
    """Asked only when a word may be a user."""

    @cached_property
    def _client(self) -> FleetClient:
        return connection.connect()

    @cached_property
    def me(self) -> str:
        return self._client.me().name

    def is_user(self, word: str) -> bool:
        """Me, or whoever has submitted a job."""
        if _NAME.fullmatch(word) is None:
            return False
        return word == self.me or any(
            self._client.jobs(owner=word, archived=archived, limit=1).jobs
            for archived in (False, True)
        )

    def close(self) -> None:
        if "_client" in self.__dict__:
            self._client.close()


def without_user(verb: str, args: list[str]) -> list[str]:
    """The arguments of a former verb as today's command takes them, after a hint."""
    with contextlib.closing(_Server()) as server:
        try:
            return _run(args, server) if verb == "run" else _without_user(verb, args, server)
        except FleetError:
            return args  # the command itself reports that the server does not respond


def _without_user(verb: str, args: list[str], server: _Server) -> list[str]:
    end = args.index("--") if "--" in args else len(args)
    words = [index for index in range(end) if not args[index].startswith("-")]
    explicit = [index for index in words if _EXPLICIT.fullmatch(args[index])]
    others = [index for index in words if index not in explicit][WITH_USER[verb] :]
    found = explicit or [index for index in others if server.is_user(args[index])][-1:]
    if not found:
        return args
    typed = args[found[0]]
    pair = _EXPLICIT.fullmatch(typed)
    user = typed if pair is None else pair[2]
    rest = [word for index, word in enumerate(args) if index not in found]
    if user == server.me or (pair is not None and pair[1] == "id"):
        not_needed(typed, OWN_NAME)
        return rest
    if verb in _LISTING:
        return ["--user", user, *rest]
    if verb in OF_JOBS and rest:
        hint(f"jobs of {user} are written {user}/JOB")
        first = next((index for index, word in enumerate(rest) if not word.startswith("-")), 0)
        return [*rest[:first], f"{user}/{rest[first]}", *rest[first + 1 :]]
    raise HintedUsageError(
        f"`tpu {verb}` is for what is yours, and you are {server.me}, not {user}\n"
        f"  next: leave out {typed}; jobs of {user} are written {user}/JOB"
    )


def _run(args: list[str], server: _Server) -> list[str]:
    """`run TYPE 2 ada tag=x`: a working directory, and a user, before the command."""
    end = args.index("--") if "--" in args else len(args)
    bare = list(_bare(args[:end]))
    if end == len(args):  # the words may be a command
        others = [word for index, word in enumerate(args[1:], 1) if index not in bare]
        if not all(is_former(word) or word.startswith("-") for word in others):
            return args
        named = [index for index in bare if not args[index].isdigit()]
        if len(named) > 1 or any(not server.is_user(args[index]) for index in named):
            return args
    rest = list(args)
    for index in reversed(bare):
        if args[index].isdigit():
            rest[index] = f"dir={args[index]}"
        elif server.is_user(args[index]):
            not_needed(args[index], OWN_NAME)
            del rest[index]
    return rest


def _bare(words: list[str]) -> Iterator[int]:
    """Those that are neither the type, an option or its value, nor `name=value`."""
    for index, word in enumerate(words[1:], 1):
        before = words[index - 1]
        value = before.startswith("-") and not is_former(before)
        if not (word.startswith("-") or value or "=" in word):
            yield index


def with_default_command(args: list[str]) -> list[str]:
    """`run TYPE` runs what is the default in directory 1, or in that of `dir=2`."""
    words = args[1:]
    with_value = options_with_value()
    if (
        not args
        or "--" in args
        or not all(is_former(each) or each.startswith("-") for each in words)
        or with_value & {each.partition("=")[0] for each in words}
    ):
        return args
    numbers = [word.removeprefix("dir=") for word in words if word.startswith("dir=")]
    number = numbers[-1] if numbers else "1"
    try:
        with connection.connect() as client:
            folder = client.preferences().folders.get(number)
    except FleetError:
        return args
    command = former_notes.default_command(Path(folder)) if folder else None
    if command is None:
        return args
    hint(f"no command: `{shlex.join(command)}`, the default in {folder}")
    others = [word for word in words if not word.startswith("dir=")]
    return [args[0], *others, f"dir={number}", "--", *command]


def reservation_of_pool(args: list[str]) -> list[str]:
    """`rel POOL` ends what `zhan POOL` reserved."""
    try:
        with connection.connect() as client:
            me = client.me().name
            mine = {each.pool: each.id for each in client.reservations() if each.owner == me}
    except FleetError:
        return args
    return [mine.get(word, word) for word in args]


def folder_of_another(verb: str, args: list[str]) -> list[str] | None:
    """User, number and path, if an admin sets a directory of another user."""
    words = [word.removeprefix("user=") for word in args if not word.startswith("-")]
    if len(words) != WITH_USER[verb] + 1:
        return None
    *words, user = words
    try:
        with connection.connect() as client:
            me = client.me()
            if user == me.name or user not in {each.name for each in client.users()}:
                return None
    except FleetError:  # only admins list users
        return None
    path = Path.cwd() if verb == "set-cur" else Path(words[0]).expanduser().resolve()
    return [user, words[-1], str(path)]


def node_arguments(verb: str, args: list[str]) -> list[str]:
    """With the node that an alias means. With the name of a job: say what is meant, and do
    nothing."""
    at = next((index for index, word in enumerate(args) if not word.startswith("-")), None)
    if at is None:
        return args
    name = args[at]
    try:
        with connection.connect() as client:
            node = client.preferences().tpu_aliases.get(name, name)
            if node == name or type_lookup.is_known(node):
                rows = client.inventory().rows
                node = next((row.node for row in rows if row.node and row.alias == name), name)
            if node != name:
                hint(f"{name} is an alias of {node}")
                return [*args[:at], node, *args[at + 1 :]]
            job = client.job(name).job
    except FleetError:  # no such job, or no server that would know
        return args
    raise HintedUsageError(
        f"{job.spec.name} ({job.id}) is a job, not a VM; it is {job.state.value}\n"
        f"  next: {OF_NODES[verb].format(job=name)}"
    )

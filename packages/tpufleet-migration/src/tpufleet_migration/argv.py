"""The words of other tools as commands of today: an entry point of `tpu`, called before its words
are parsed. Imports only data, because every command waits for it."""

from __future__ import annotations

import os
import re

from tpufleet.views.cli import registry
from tpufleet.views.cli.registry import COMPLETION_VARIABLE, HintedUsageError
from tpufleet_migration import former_flags, former_names
from tpufleet_migration.former_flags import hint, not_needed

_HELP = {"-h", "--help"}


def translate(args: list[str]) -> list[str]:
    """With a former name replaced by today's command, after a hint; or an error that says what to
    use instead."""
    verb, rest = args[0], args[1:]
    if verb in former_names.FOREIGN_NAMES:
        raise HintedUsageError(f"unknown command {verb!r}; {former_names.FOREIGN_NAMES[verb]}")
    former = former_names.FORMER_NAMES.get(verb)
    if isinstance(former, former_names.Unsupported):
        raise HintedUsageError(f"no command {verb!r}: {former.reason}\n  next: {former.instead}")
    if verb in ("set-cur", "set-dir") and not _HELP & {*rest}:
        from tpufleet_migration import former_users

        if others := former_users.folder_of_another(verb, rest):
            return ["config", "user-dir", *others]
    if verb == "queue" and rest and former_names.QUEUED_TYPE.fullmatch(rest[0]):
        hint(f"to queue a job is now `tpu run --detach {rest[0]}`")
        end = rest.index("--") if "--" in rest else len(rest)
        verb, rest = "run", [*rest[:end], "-q", *rest[end:]]
    if verb in former_names.LISTINGS and not {*_HELP, "cloud"} & {*rest[:1]}:
        rest, dropped = former_names.listing_arguments(rest)
        for word in dropped:
            not_needed(word, former_names.LAYOUT)
    if verb == "vm" or (former is not None and former.arguments[0] == "vm"):
        rest = [word for each in rest for word in _retry_option(each)]
    rest = _understood(verb, rest)
    if verb == "check" and rest[:1] != ["cloud"]:
        hint("`tpu check` is now `tpu jobs`; `tpu init check` checks your cloud project")
        return ["jobs", *rest]
    if former is None:
        return [verb, *rest]
    note = f" ({former.note})" if former.note else ""
    hint(f"`tpu {verb}` is now `tpu {' '.join(former.arguments)}`{note}")
    if former.arguments[0] == "edit":
        _, option, *options = former.arguments
        helped = _HELP & {*rest}
        return ["edit", "--help"] if helped else registry.edit_arguments(option, [*options, *rest])
    return [*former.arguments, *rest]


def _retry_option(word: str) -> list[str]:
    """`t=10` is `--retry-delay 10`, `m=2000` is `--max-retries 2000`."""
    match = re.fullmatch(r"([tm])=(\d+)", word)
    if match is None:
        return [word]
    return ["--retry-delay", match[2]] if match[1] == "t" else ["--max-retries", match[2]]


def _understood(verb: str, args: list[str]) -> list[str]:
    """Without a user among the words; an error when a job is named instead of a node."""
    dropped = dict(former_names.DROPPED_WORDS.get(verb, {}))
    if verb in former_names.FORMER_NAMES:
        dropped |= former_names.DROPPED_FLAGS
    for word in [word for word in args if word in dropped]:
        not_needed(word, dropped[word])
    args = [word for word in args if word not in dropped]
    replaced = former_names.REPLACED_WORDS.get(verb, {})
    args = [replaced.get(word, word) for word in args]
    if verb == "find":
        args = [each for word in args for each in former_names.generations(word)]
    if not args or COMPLETION_VARIABLE in os.environ or _HELP & {*args}:
        return args
    from tpufleet_migration import former_users  # imports what connects to the server

    if verb in former_users.OF_JOBS:
        former_flags.refuse_window(verb, args)
    if verb in former_users.OF_NODES:
        args = former_users.node_arguments(verb, args)
    if verb in former_users.WITH_USER:
        args = former_users.without_user(verb, args)
    if verb in former_users.OF_RESERVATIONS:
        args = former_users.reservation_of_pool(args)
    if verb == "run":
        return former_flags.run_arguments(former_users.with_default_command(args))
    return former_flags.resubmit_arguments(verb, args) if verb in ("resume", "rerun") else args

"""Flags of `run`, `resume` and `rerun` of the job manager that this program replaces: what each one
means today. A hint names today's spelling."""

from __future__ import annotations

import re

import click

from tpufleet.views.cli.registry import HintedUsageError

# `name=value` before `--`, and the option that it is now.
RUN_VALUES = {
    "dir": "--dir",
    "tag": "--tag",
    "rule": "--rule",
    "ssn": "--note",
    "pm": "--reuse",
    "pool": "--pool",
}
RUN_FLAGS = {
    "-q": "--detach",
    "-p": "--spot",
    "-pre": "--spot",
    "-n": "--on-demand",
    "-norm": "--on-demand",
}
OWN_NAME = "your token says who you are"
# Not needed any more, and why.
DROPPED = {
    **dict.fromkeys(
        ("-f", "-apply", "-auto", "--auto", "--register"),
        "slices are chosen, recorded and replaced without a flag",
    ),
    "-no-tag": "notes do not become tags",
    **dict.fromkeys(("-ssn", "--ssn"), "pass --note TEXT"),
    "--log-stage": "TPUFLEET_STAGE is set for every attempt",
    **dict.fromkeys(("user", "id"), OWN_NAME),
}
RESUBMIT_VALUES = {"tpu": "--type", "ka": "--type"}
_WINDOW = re.compile(r"(-?w|windows?)=.*")
_PAIR = re.compile(r"([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


def run_arguments(args: list[str]) -> list[str]:
    """Former words before `--` as options of today; words after it belong to the command, and words
    after an option that takes a value to that."""
    with_value = options_with_value()
    if args[:1] in (["-a"], ["--all"]):
        args = ["v*", *args[1:]]
        _hint("run", ["'v*'", "…"])
    if "--" not in args:
        words = args[1:]
        if args and not args[0].startswith("-") and all(is_former(word) for word in words):
            shown = " ".join([*args[:1], *_options(words)])
            raise HintedUsageError(f"no command to run\n  next: tpu run {shown} -- python train.py")
        return args
    at = args.index("--")
    before, taken = [], False
    for position, word in enumerate(args[:at]):
        value_of_option = position > 0 and args[position - 1] in with_value
        if position == 0 or value_of_option or not is_former(word):
            before.append(word)
        else:
            before += _options([word])
            taken = True
    if taken:
        _hint("run", [*before, "-- …"])
    return [*before, *args[at:]]


def options_with_value() -> set[str]:
    from tpufleet.views.cli.jobs.submit import run

    options = [each for each in run.params if isinstance(each, click.Option) and not each.is_flag]
    return {name for option in options for name in option.opts}


def is_former(word: str) -> bool:
    return word in RUN_FLAGS or word in DROPPED or _PAIR.fullmatch(word) is not None


def _options(words: list[str]) -> list[str]:
    options: list[str] = []
    for word in words:
        pair = _PAIR.fullmatch(word)
        name, value = (pair[1], pair[2]) if pair else (word, "")
        if name in DROPPED:
            not_needed(word, DROPPED[name])
        elif pair is None:
            options.append(RUN_FLAGS[word])
        elif name == "monitor":
            options += ["--detach"] if value.lower() in ("false", "0") else []
        elif name in RUN_VALUES:
            options += [RUN_VALUES[name], value]
        else:
            options += ["--config", word]
    return options


def refuse_window(verb: str, args: list[str]) -> None:
    for word in args:
        if word == "--":
            return
        if _WINDOW.fullmatch(word):
            raise HintedUsageError(
                f"{word}: jobs have names and ids instead of windows\n"
                f"  next: `tpu jobs` lists them, `tpu {verb} JOB`"
            )


def resubmit_arguments(verb: str, args: list[str]) -> list[str]:
    """`tpu=v4-32` is the type, not an argument of the command."""
    translated: list[str] = []
    for position, word in enumerate(args):
        if word == "--":
            return [*translated, *args[position:]]
        name, equals, value = word.partition("=")
        if equals and name in RESUBMIT_VALUES:
            translated += [RESUBMIT_VALUES[name], value]
            _hint(verb, [*translated, "…"])
        else:
            translated.append(word)
    return translated


def _hint(verb: str, words: list[str]) -> None:
    hint(f"this is now `tpu {verb} {' '.join(words)}`")


def not_needed(word: str, reason: str) -> None:
    hint(f"{word} is not needed: {reason}")


def hint(text: str) -> None:
    click.echo(f"hint: {text}", err=True)

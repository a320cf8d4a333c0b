"""The options of `tpu run`, and the job file that they stand for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from tpufleet.errors import BadInput
from tpufleet.model.jobs import Capacity
from tpufleet.views.cli.output import repeatable

_CAPACITY = "tpufleet.capacity"


def _note_capacity(context: click.Context, option: click.Parameter, given: bool) -> None:
    """click calls this in the order of the command line, which is the order of preference."""
    if given:
        context.meta.setdefault(_CAPACITY, []).append(str(option.name).replace("_", "-"))


def _capacity_flag(kind: Capacity, words: str) -> Callable[[Any], Any]:
    return click.option(
        f"--{kind}", is_flag=True, expose_value=False, callback=_note_capacity, help=words
    )


OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--name", help="What to call the job (default: after the command)."),
    _capacity_flag(Capacity.SPOT, "Use spot capacity (the default). Several kinds: in order."),
    _capacity_flag(Capacity.ON_DEMAND, "Use on-demand capacity."),
    _capacity_flag(Capacity.RESERVED, "Use a reservation."),
    _capacity_flag(Capacity.QUEUED, "Use queued resources."),
    repeatable("--zone", metavar="ZONE", help="Zone; repeat it in order of preference."),
    repeatable("--provider", metavar="NAME", help="Source of slices: local, tpu-vm, gke."),
    click.option("--slices", metavar="N", help="Slices that run together (default: 1)."),
    click.option("--pool", metavar="NAME", help="Run on slices of this pool only."),
    repeatable("--env", metavar="NAME=VALUE", help="Environment variable of the command."),
    repeatable("--secret", metavar="NAME=REF", help="Environment variable from a secret."),
    click.option(
        "--workdir", metavar="FOLDER", help="What is copied to every host (default: this folder)."
    ),
    click.option("--checkpoint", metavar="PLACE", help="Where checkpoints are kept."),
    click.option("--setup", metavar="SCRIPT", help="What every host runs first."),
    click.option("--timeout", metavar="SPAN", help="Most time spent running, such as 12h."),
    click.option("--priority", metavar="N", help="Larger goes first (default: 0)."),
    click.option("--rule", metavar="RULE", help="pre, pass, reapply, rerun, resume (`tpu rules`)."),
    repeatable("--retries", metavar="KIND=N", help="Tries again, such as failure=2."),
    click.option("--crash-loop", metavar="N", help="Stop after N tries without a checkpoint (3)."),
    click.option("--grace", metavar="SPAN", help="Time between SIGTERM and SIGKILL (30s)."),
    click.option("--hung-after", metavar="SPAN", help="No progress for this long is a hang (30m)."),
    repeatable("--tag", metavar="WORD", help="Word to find the job by."),
    click.option("--note", metavar="TEXT", help="Anything that you want to remember."),
)


def spec_options(command: Any) -> Any:
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def plain_from(
    accelerator: str, command: tuple[str, ...], capacity: list[str], options: dict[str, Any]
) -> dict[str, Any]:
    """The job file that these options stand for; what was not given is left out."""
    plain: dict[str, Any] = {"accelerator": accelerator, "command": _command(command)}
    for field, value in {
        **{
            field: options[field]
            for field in ("name", "pool", "workdir", "checkpoint", "setup", "timeout", "rule")
        },
        "grace": options["grace"],
        "hung_after": options["hung_after"],
        "slices": _number(options["slices"]),
        "priority": _number(options["priority"]),
        "crash_loop": _number(options["crash_loop"]),
        "capacity": capacity,
        "zones": list(options["zone"]),
        "providers": list(options["provider"]),
        "tags": list(options["tag"]),
        "notes": options["note"],
        "env": _pairs("env", options["env"]),
        "secrets": _pairs("secret", options["secret"]),
        "retries": {k: _number(v) for k, v in _pairs("retries", options["retries"]).items()},
    }.items():
        if value not in (None, [], {}):
            plain[field] = value
    return plain


def capacity_of(context: click.Context) -> list[str]:
    return list(context.meta.get(_CAPACITY, []))


def _command(words: tuple[str, ...]) -> list[str] | str:
    """One word with spaces in it is a script, as text is in a job file."""
    return words[0] if len(words) == 1 and re.search(r"\s", words[0]) else list(words)


def _number(written: str | None) -> int | str | None:
    """A whole number where it is one; otherwise as it stands, to be refused with its cure."""
    whole = written is not None and re.fullmatch(r"-?[0-9]{1,18}", written)
    return int(written) if whole else written  # type: ignore[arg-type]


def _pairs(option: str, given: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals:
            raise BadInput(f"--{option} {name}: no value; write --{option} {name or 'NAME'}=…")
        pairs[name] = value
    return pairs

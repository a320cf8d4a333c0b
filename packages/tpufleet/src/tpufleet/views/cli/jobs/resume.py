"""`tpu resume` and `tpu rerun`: a new job from an ended one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from tpufleet.errors import BadInput, invalid
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option
from tpufleet.views.cli.usage_errors import HintedUsageError

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient
    from tpufleet.model.job.jobs import JobSpec

_COMMAND = "tpufleet.resume.command"
_OPTION = re.compile(r"-{1,2}[A-Za-z]")  # not a negative number


class _CommandWithNewCommand(click.Command):
    """Keeps what follows `--` apart: it is the new command of the job."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            context.meta[_COMMAND] = tuple(args[at + 1 :])
            args = args[:at]
        try:
            return super().parse_args(context, list(args))
        except click.NoSuchOption as error:
            typed = next((arg for arg in args if arg.startswith(error.option_name)), "")
            example = typed.lstrip("-") if "=" in typed else f"{typed.lstrip('-')}=VALUE"
            raise HintedUsageError(
                f"no such option: {error.option_name}\n  next: to change that argument of the "
                f"command write `{example}` without dashes, or pass the whole command after `--`",
                context,
            ) from error

    def collect_usage_pieces(self, context: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(context), "[-- CMD…]"]


_resubmit_options = output.options(
    click.argument("job"),
    click.argument("arguments", metavar="[KEY=VALUE…]", nargs=-1),
    click.option(
        "--new-code",
        metavar="[DIR]",
        is_flag=False,
        flag_value=".",
        help="Use the code in DIR (default: the current folder), not that of JOB.",
    ),
    click.option("--type", "accelerator", metavar="TYPE", help="Type of slice, as for `run`."),
    output.tag_option("--tag"),
    output.repeatable(
        "--set", "settings", metavar="PATH=VALUE", help="Override a field, such as name."
    ),
    output.detach_option,
    json_option,
)


@click.command(
    cls=_CommandWithNewCommand,
    epilog="\b\nExamples:\n  tpu resume train --new-code\n"
    "  tpu resume train lr=0.001 --type v4-32\n"
    "  tpu resume train --set timeout=48h --detach\n  tpu resume train -- python train.py --eval\n",
)
@_resubmit_options
@click.pass_context
def resume(context: click.Context, job: str, **options: Any) -> None:
    """Continue an ended JOB from its last checkpoint, and follow it like `tpu run`.

    This creates a new job whose parent is the old one, with the same code unless --new-code is
    given. KEY=VALUE replaces that argument of the command (KEY=…, --KEY=… or --KEY …), or is
    appended to it; if the command is a script, it sets a variable of its environment. A command
    after `--` replaces all of it.
    """
    context.exit(_resubmit(context, "resume", job, **options))


@click.command(
    cls=_CommandWithNewCommand,
    epilog="\b\nExamples:\n  tpu rerun train\n  tpu rerun train lr=0.02 --tag sweep-3 --detach\n"
    "  tpu rerun train --new-code --set env.SEED=2\n",
)
@_resubmit_options
@click.pass_context
def rerun(context: click.Context, job: str, **options: Any) -> None:
    """Run an ended JOB again from the beginning, without its checkpoints, and follow it like
    `tpu run`.

    This creates a new job whose parent is the old one, with the same code unless --new-code is
    given. KEY=VALUE replaces that argument of the command (KEY=…, --KEY=… or --KEY …), or is
    appended to it; if the command is a script, it sets a variable of its environment. A command
    after `--` replaces all of it.
    """
    context.exit(_resubmit(context, "rerun", job, **options))


def _resubmit(
    context: click.Context,
    action: Literal["resume", "rerun"],
    job: str,
    *,
    arguments: tuple[str, ...],
    new_code: str | None,
    accelerator: str | None,
    tags: tuple[str, ...],
    settings: tuple[str, ...],
    detach: bool,
) -> int:
    from tpufleet.views.cli.jobs import run_aliases, submit

    if accelerator is not None:
        target = run_aliases.resolve(accelerator, (), (), None)
        accelerator = target.accelerator
        if target.pool is not None:
            settings = (f"pool={target.pool}", *settings)
    with connection.connect() as client:
        parent = client.job(job).job  # by id from here on: a name could mean the new job
        changes = changed_fields(
            parent.spec,
            arguments=arguments,
            accelerator=accelerator,
            tags=tags,
            settings=settings,
            command=context.meta.get(_COMMAND, ()),
        )
        if appended := _appended(parent.spec, context.meta.get(_COMMAND, ()), changes):
            names = ", ".join(each.split("=")[0] for each in appended)
            output.print_status(
                f"the command has no argument {names}; appended {' '.join(appended)}"
            )
        if new_code is None and "workdir" in changes:
            new_code = str(Path(changes["workdir"]).expanduser())
        snapshot = None if new_code is None else _upload(client, new_code)
        send = client.resume if action == "resume" else client.rerun
        row = send(parent.id, changes, snapshot=snapshot)
        how = "resumed" if action == "resume" else "rerunning"
        code = " with new code" if snapshot not in (None, parent.snapshot) else ""
        message = f"{how} {row.name} as {row.id} (parent {row.parent}){code}"
        if detach or not client.preferences().setting("monitor_after_run"):
            output.print_result(row, message)
            return 0
        if not output.as_json():
            click.echo(message)
        return submit.follow_jobs(client, (row,), announce=False)


def changed_fields(
    spec: JobSpec,
    *,
    arguments: Sequence[str],
    accelerator: str | None,
    tags: Sequence[str],
    settings: Sequence[str],
    command: Sequence[str],
) -> dict[str, Any]:
    """The fields of the job file that these options change."""
    from tpufleet.model.job import job_file
    from tpufleet.views.cli.jobs import job_files, job_options

    before = job_file.to_document(spec)
    # A change inside a mapping (env.LR=1) must keep the mapping's other entries.
    after = job_files.with_overrides(before, tuple(settings))
    if accelerator is not None:
        after["accelerator"] = accelerator
    if tags:
        after["tags"] = list(dict.fromkeys([*after.get("tags", []), *tags]))
    if command:
        after["command"] = job_options.command_of(tuple(command))
    if arguments:
        if _is_script(after["command"]):
            after["env"] = {**after.get("env", {}), **_as_variables(spec, arguments)}
        else:
            after["command"] = _with_arguments(after["command"], arguments)
    job_file.parse_job(after)
    return {each: after[each] for each in after if after[each] != before.get(each)}


def changes_from_line(spec: JobSpec, line: str) -> dict[str, Any]:
    """The same from a line with the options of `tpu rerun`: `lr=0.1 --type v4-32`."""
    import shlex

    try:
        context = rerun.make_context("rerun", ["JOB", *shlex.split(line)])
    except ValueError as error:  # an open quote
        raise BadInput(f"{line}: {error}") from error
    except click.UsageError as error:
        raise BadInput(error.format_message()) from error
    if context.params["new_code"] is not None:
        raise BadInput("--new-code needs a folder; use `tpu rerun` in the terminal")
    names = ("arguments", "accelerator", "tags", "settings")
    options = {each: context.params[each] for each in names}
    return changed_fields(spec, **options, command=context.meta.get(_COMMAND, ()))


def _upload(client: FleetClient, folder: str) -> str:
    """The digest of the code in this folder, which the server has afterwards."""
    from tpufleet.client import snapshots

    if not Path(folder).is_dir():
        example = "--new-code=DIR, or --new-code last for the current folder"
        raise invalid(folder, "a folder", example, "--new-code")
    scanned = snapshots.scan(folder, connection.settings().snapshot_limit)
    snapshots.upload(client, scanned)
    return scanned.digest


def _is_script(command: Any) -> bool:
    from tpufleet.model.job.spec_types import SHELL

    return not isinstance(command, list) or tuple(command[: len(SHELL)]) == SHELL


def _as_variables(spec: JobSpec, arguments: Sequence[str]) -> dict[str, str]:
    """A script has no arguments: they are variables of its environment, if it knows them."""
    variables = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        used = re.search(rf"\$\{{?{re.escape(name)}\b", spec.command[-1])
        if not equals or not (used or name in spec.env):
            raise BadInput(
                f"{argument}: the command of {spec.name} is a script that does not use ${name}; "
                f"pass the whole command after `--`, or a variable as --set env.{name}=VALUE"
            )
        variables[name] = value
    return variables


def _with_arguments(command: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """`lr=0.1` replaces `lr=…`, `--lr=…` or `--lr …` in the command, or is appended to it."""
    changed = list(command)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key:
            raise BadInput(f"{argument}: not KEY=VALUE, such as lr=0.1; put a command after `--`")
        pattern = re.compile(rf"-{{0,2}}{re.escape(key.lstrip('-'))}=")
        same = [at for at, old in enumerate(changed) if pattern.match(old)]
        for at in same:
            dashes = changed[at][: len(changed[at]) - len(changed[at].lstrip("-"))]
            changed[at] = dashes + argument.lstrip("-")
        option = re.compile(rf"--?{re.escape(key.lstrip('-'))}")
        two_words = [
            at + 1
            for at, old in enumerate(changed[:-1])
            if option.fullmatch(old) and not _OPTION.match(changed[at + 1])
        ]
        for at in two_words:
            changed[at] = value
        if not same and not two_words:
            changed.append(argument)
    return changed


def _appended(spec: JobSpec, command: Sequence[str], changes: dict[str, Any]) -> list[str]:
    """The arguments that replaced none: the words by which the new command is longer."""
    changed = changes.get("command", [])
    return changed[len(command or spec.command) :] if isinstance(changed, list) else []

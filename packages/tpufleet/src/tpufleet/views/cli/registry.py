"""The table of `tpu` commands, each imported only when it is called.

A command is one module with its options beside it, and one line in this table. `tpu --help` must
respond at once, so nothing but click and the standard library is imported here.
"""

from __future__ import annotations

import importlib
import itertools
import os
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tpufleet.entry_points import registered
from tpufleet.views.cli.usage_errors import HintedUsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

PACKAGE = "tpufleet.views.cli"
COMPLETION_VARIABLE = "_TPU_COMPLETE"  # set by the completion scripts that click writes


class LazyCommand(NamedTuple):
    help: str  # its line in `tpu --help`
    target: str  # `module:attribute`, below PACKAGE or of another distribution
    hidden: bool = False  # from help: programs call it

    def load(self, path: str = "") -> click.Command:
        """`path`: its words after `tpu`, by which completion knows what its arguments mean."""
        module, _, attribute = self.target.partition(":")
        if not module.startswith("tpufleet"):
            module = f"{PACKAGE}.{module}"
        command: click.Command = getattr(importlib.import_module(module), attribute)
        if COMPLETION_VARIABLE in os.environ:
            from tpufleet.views.cli import completion_values

            completion_values.add_to(command, path)
        return command


# Of the core, by section of `tpu --help`, in the order shown. The first section has one line per
# command.
SECTIONS: dict[str, dict[str, LazyCommand]] = {
    "Everyday": {
        "run": LazyCommand("Run a command on a TPU slice and follow it.", "jobs.submit:run"),
        "submit": LazyCommand("Submit the jobs in a file.", "jobs.submit:submit"),
        "jobs": LazyCommand("List and search jobs, newest first.", "jobs.jobs:jobs"),
        "show": LazyCommand("Show one job: spec, attempts, slices, hosts.", "jobs.jobs:show"),
        "logs": LazyCommand("Print the logs of a job.", "jobs.logs:logs"),
        "why": LazyCommand("Explain why a job waits or why it ended.", "jobs.jobs:why"),
        "top": LazyCommand("Jobs, slices, queue and events on one screen.", "jobs.top:top"),
        "cancel": LazyCommand("Cancel jobs.", "jobs.cancel:cancel"),
        "resume": LazyCommand("Continue a job from its last checkpoint.", "jobs.resume:resume"),
        "rerun": LazyCommand("Run a job again from the beginning.", "jobs.resume:rerun"),
        "compare": LazyCommand(
            "Metrics of a job; or compare jobs: config, code, curves.", "jobs.compare:compare"
        ),
        "queue": LazyCommand("List and reorder waiting jobs.", "jobs.queue:queue"),
        "inventory": LazyCommand(
            "Slices, pools and notes in one table.", "slices.inventory:inventory"
        ),
        "reserve": LazyCommand(
            "Reserve slices of a pool for a time.", "slices.reservations:reserve"
        ),
        "cost": LazyCommand("Show chip hours, cost and budgets.", "slices.cost:cost"),
        "dash": LazyCommand("Open the web page.", "operators.dash:dash"),
    },
    "Jobs": {
        "events": LazyCommand("Print events of a job or of the fleet.", "jobs.logs:events"),
        "edit": LazyCommand("Change name, tags, notes or priority.", "jobs.edit:edit"),
        "archive": LazyCommand("Hide ended jobs, or delete their files.", "jobs.archive:archive"),
        "profile": LazyCommand("Record a JAX profile of a running job.", "jobs.profile:profile"),
        "tensorboard": LazyCommand("Open jobs in TensorBoard.", "jobs.tensorboard:tensorboard"),
        "demo": LazyCommand("Show a job that is preempted and finishes.", "jobs.demo:demo"),
    },
    "Slices": {
        "pool": LazyCommand("Manage pools of slices.", "slices.pool:pool"),
        "adopt": LazyCommand("Use a TPU VM made by hand in a pool.", "slices.adopt:adopt"),
        "types": LazyCommand("List TPU types, and what zones granted.", "slices.types:types"),
        "exec": LazyCommand("Run a command on the hosts of a slice.", "slices.exec:exec_"),
        "ssh": LazyCommand("Open a shell on a host, through gcloud.", "slices.ssh:ssh"),
        "doctor": LazyCommand("Diagnose and repair a slice.", "slices.doctor:doctor"),
        "vm": LazyCommand("Manage TPU VMs without a server.", "vm.group:vm"),
    },
    "Settings": {
        "config": LazyCommand(
            "Settings, aliases, views, completion.", "settings.preferences:config"
        ),
        "notify": LazyCommand(
            "Messages about jobs: webhook, Slack, e-mail.", "settings.notify:notify"
        ),
        "secret": LazyCommand("Manage values that jobs get by name.", "settings.users:secret"),
        "token": LazyCommand("Manage API tokens.", "settings.users:token"),
    },
    "Operators": {
        "status": LazyCommand(
            "Show the state of the server and its providers.", "operators.status:status"
        ),
        "init": LazyCommand("Set up and check a cloud project.", "operators.init:init"),
        "serve": LazyCommand("Run the server.", "operators.serve:serve"),
        "user": LazyCommand("Manage users and roles; the audit log.", "settings.users:user"),
        "backup": LazyCommand("Back up and restore a server.", "operators.backup:backup"),
        "deploy": LazyCommand("Run the server on a VM or on GKE.", "operators.deploy:deploy"),
        "agent": LazyCommand("Run the agent of one host.", "operators.agent:agent", hidden=True),
    },
}
# What commands were called before; still understood, and hidden from help.
RENAMED: dict[str, str] = {
    "alias": "config alias",
    "audit": "user audit",
    "budget": "cost budget",
    "bundle": "deploy bundle",
    "check cloud": "init check",
    "completion": "config completion",
    "dir": "config dir",
    "fault": "doctor fault",
    "find": "inventory",
    "metrics": "compare",
    "purge": "archive purge",
    "queue remove": "cancel --waiting",
    "release": "reserve end",
    "reservations": "reserve list",
    "reservations break": "reserve end",
    "reservations extend": "reserve extend",
    "reservations release": "reserve end",
    "restore": "backup restore",
    "rules": "config rules",
    "slices": "inventory slices",
    "stock": "types stock",
    "unarchive": "archive undo",
    "unregister": "adopt undo",
    "view": "config view",
    "vm fleet recreate-preempted": "vm fleet create",
    "vm fleet status": "vm fleet list",
    "vm reapply": "vm apply --replace",
}
# `tpu tag JOB TAG…` is `tpu edit JOB --tag TAG…`. `tpu note JOB` alone shows the job.
EDITS = {"note": "--note", "priority": "--priority", "rename": "--name", "tag": "--tag"}
# They stop, delete or rebuild something, so a misspelling must never lead to one of them.
DESTRUCTIVE = {
    "archive", "cancel", "delete", "mount-disk", "purge", "repair", "restart", "restore",
}  # fmt: skip
CLUSTER = "tpufleet.views.cli.cluster:cluster"  # a group to which several distributions contribute
COMMAND_TABLES = "tpufleet.commands"  # entry points: by section, the commands of a distribution
TRANSLATORS = "tpufleet.argv"  # entry points: functions that change the words of `tpu`

UNPARSED = ("--", "kubectl")  # what follows belongs to another program
NEARNESS = 0.7  # of a word to a command that it may mean
TITLE_WIDTH = 13  # column of section titles in `tpu --help`, with its margins
HELP = """Run JAX jobs on Cloud TPUs to completion. `tpu demo` simulates one here."""
EPILOG = "`tpu help CMD` explains a command and shows examples of it."
ROOT_OPTIONS = ("-h", "--help", "--server", "--version")


def sections() -> dict[str, dict[str, LazyCommand]]:
    """The commands of all installed distributions."""
    merged = {title: dict(commands) for title, commands in SECTIONS.items()}
    for table in registered(COMMAND_TABLES):
        for title, commands in table.items():
            merged[title].update(commands)
    return merged


def commands() -> dict[str, LazyCommand]:
    return {name: command for section in sections().values() for name, command in section.items()}


class LazyGroup(click.Group):
    """A group that lists its commands without loading them."""

    def __init__(
        self, *, sections: Mapping[str, Mapping[str, LazyCommand]], **attributes: object
    ) -> None:
        super().__init__(**attributes)  # type: ignore[arg-type]  # click's own keywords
        self.sections = sections
        self.lazy_commands = {
            name: command for section in sections.values() for name, command in section.items()
        }

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.lazy_commands)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        lazy = self.lazy_commands.get(name)
        return None if lazy is None else lazy.load(name)

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        items = [
            CompletionItem(name, help=lazy.help)
            for name, lazy in self.lazy_commands.items()
            if name.startswith(incomplete) and not lazy.hidden
        ]
        return [*items, *click.Command.shell_complete(self, context, incomplete)]

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.lazy_commands and not name.startswith("-"):
            import difflib

            safe = [each for each in self.lazy_commands if each not in DESTRUCTIVE]
            close = difflib.get_close_matches(name, safe, n=1, cutoff=NEARNESS)
            path = context.command_path
            hint = f"`{path} --help` lists all commands"
            if close:
                hint = did_you_mean(path, close[0])
            raise HintedUsageError(f"unknown command {name!r}; {hint}")
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, lazy.help) for name, lazy in commands.items()])


def did_you_mean(path: str, name: str) -> str:
    return f"did you mean `{path} {name}`?"


class SharedOptions(click.Group):
    """Its options are those of all its commands, and may be written after their names too."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        end = next((at for at, word in enumerate(args) if word in UNPARSED), len(args))
        own = {name for each in self.params for name in each.opts}
        shared: list[str] = []
        rest: list[str] = []
        words = iter(args[:end])
        for word in words:
            name, equals, _ = word.partition("=")
            if name not in own:
                rest.append(word)
            else:
                shared += [word] if equals else [word, *itertools.islice(words, 1)]
        return super().parse_args(context, [*shared, *rest, *args[end:]])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        command = super().get_command(context, name)
        if command is not None and not isinstance(command, click.Group):
            names = ", ".join(each.opts[0] for each in self.params)
            hint = f"See `{context.command_path} --help` for {names}.\n"
            command.epilog = f"{(command.epilog or '').removesuffix(hint).rstrip()}\n\n{hint}"
        return command


class SharedLazyGroup(SharedOptions, LazyGroup):
    """Both."""


def shared_option(name: str) -> Any:
    """What was given for an option of a group above the command that runs."""
    context: click.Context | None = click.get_current_context()
    while context is not None and name not in context.params:
        context = context.parent
    return None if context is None else context.params[name]


class RootGroup(LazyGroup):
    """`tpu`: its help fits one screen, and earlier names of commands lead to today's."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if args[:1] in (["help"], ["tldr"]) or (args[:1] in (["-h"], ["--help"]) and args[1:]):
            args = [*args[1:], "--help"]
        elif args[:1] == ["version"]:
            args = ["--version"]
        elif args and args[0].startswith("-") and args[0].split("=")[0] not in ROOT_OPTIONS:
            args = _translated(args)  # some names of other tools look like options
        return super().parse_args(context, args)

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(context, _renamed(_translated(args)))

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        (everyday, commands), *others = self.sections.items()
        with formatter.section(everyday):
            formatter.write_dl([(name, lazy.help) for name, lazy in commands.items()])
        with formatter.section("More"):
            width = formatter.width - TITLE_WIDTH
            for title, commands in others:
                names = [name for name, lazy in commands.items() if not lazy.hidden]
                # click would break a name at its hyphen.
                first, *rest = textwrap.wrap(", ".join(names), width, break_on_hyphens=False)
                formatter.write_dl([(f"{title:<{TITLE_WIDTH - 4}}", first)])
                for line in rest:
                    formatter.write(f"{'':{TITLE_WIDTH}}{line}\n")

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(context, formatter)
        click.Command.format_options(self, context, formatter)


def _translated(args: list[str]) -> list[str]:
    """As other distributions understand the words of other tools."""
    for translate in registered(TRANSLATORS):
        args = translate(args)
    return args


def _renamed(args: list[str]) -> list[str]:
    """With the earlier name of a command replaced by today's, after a hint."""
    for count in (3, 2, 1):
        name = " ".join(args[:count])
        if name in RENAMED:
            _hint(name, RENAMED[name])
            return [*RENAMED[name].split(), *args[count:]]
    if args[0] == "note" and len([word for word in args if word != "--json"]) == 2:
        _hint("note JOB", "show JOB")
        return ["show", *args[1:]]
    if option := EDITS.get(args[0]):
        _hint(args[0], f"edit JOB {option}")
        return edit_arguments(option, args[1:])
    return args


def _hint(earlier: str, now: str) -> None:
    click.echo(f"hint: `tpu {earlier}` is now `tpu {now}`", err=True)


def edit_arguments(option: str, args: list[str]) -> list[str]:
    """`JOB VALUE…` as arguments of `tpu edit`."""
    words, options, rest = [], [], iter(args)
    for word in rest:
        if word in ("--remove", "-r", "--query", "-q"):
            options += [word, next(rest, "")]
        elif word == "--clear":
            options += [option, ""]
        elif word.startswith("-") and not word[1:].isdigit():
            options += [word] * (word != "--")
        else:
            words.append(word)
    job = [] if {"--query", "-q"} & {*options} else words[:1]
    values = words[len(job) :]
    if option == "--note" and values:
        values = [" ".join(values)]
    return ["edit", *job, *(each for value in values for each in (option, value)), *options]


def root() -> RootGroup:
    """The `tpu` command."""
    return RootGroup(
        name="tpu",
        sections=sections(),
        help=HELP,
        epilog=EPILOG,
        params=[
            click.Option(
                ["--server"],
                metavar="URL",
                help="Server (default: TPUFLEET_SERVER, or this machine's).",
            ),
            click.Option(
                ["--version"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_print_version,
                help="Print the version and exit.",
            ),
        ],
        callback=_remember_server,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from importlib import metadata

        click.echo(f"tpufleet {metadata.version('tpufleet')}")
        context.exit()


@click.pass_context
def _remember_server(context: click.Context, server: str | None) -> None:
    """Subcommands read it from the context: only they read the settings."""
    context.meta["tpufleet.server"] = server

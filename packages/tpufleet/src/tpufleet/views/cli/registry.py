"""The table of `tpu` commands, each imported only when it is called.

A command is one module with its options beside it, and one line in this table. `tpu --help` must
respond at once, so nothing but click and the standard library is imported here.
"""

from __future__ import annotations

import importlib
import os
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import click

from tpufleet.views.cli.entry_points import registered
from tpufleet_migration.former_names import (
    DESTRUCTIVE,
    DROPPED_FLAGS,
    DROPPED_WORDS,
    FOREIGN_NAMES,
    FORMER_NAMES,
    LISTINGS,
    QUEUED_TYPE,
    REPLACED_WORDS,
    Unsupported,
    listing_arguments,
)

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

PACKAGE = "tpufleet.views.cli"
COMPLETION_VARIABLE = "_TPU_COMPLETE"  # set by the completion scripts that click writes


class LazyCommand(NamedTuple):
    help: str  # its line in `tpu --help`
    target: str  # `module:attribute`, below PACKAGE or of another distribution

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
            "Compare jobs: config, code, metrics, curves.", "jobs.compare:compare"
        ),
        "queue": LazyCommand("List and reorder waiting jobs.", "jobs.queue:queue"),
        "inventory": LazyCommand(
            "Slices, pools and notes in one table.", "slices.inventory:inventory"
        ),
        "reserve": LazyCommand(
            "Reserve slices of a pool for a time.", "slices.reservations:reserve"
        ),
        "cost": LazyCommand("Show chip hours and cost.", "slices.cost:cost"),
        "dash": LazyCommand("Open the web page.", "operators.dash:dash"),
    },
    "Jobs": {
        "events": LazyCommand("Print events of a job or of the fleet.", "jobs.logs:events"),
        "metrics": LazyCommand("Show the metrics of a job over time.", "jobs.compare:metrics"),
        "profile": LazyCommand("Record a JAX profile of a running job.", "jobs.profile:profile"),
        "tensorboard": LazyCommand("Open jobs in TensorBoard.", "jobs.tensorboard:tensorboard"),
        "tag": LazyCommand("Add or remove tags of a job.", "jobs.edit:tag"),
        "note": LazyCommand("Set or print the notes of a job.", "jobs.edit:note"),
        "rename": LazyCommand("Give a job another name.", "jobs.edit:rename"),
        "priority": LazyCommand("Set the priority of a job.", "jobs.edit:priority"),
        "archive": LazyCommand("Hide ended jobs; deletes nothing.", "jobs.archive:archive"),
        "unarchive": LazyCommand("List archived jobs again.", "jobs.archive:unarchive"),
        "purge": LazyCommand("Delete logs, results and code of ended jobs.", "jobs.archive:purge"),
        "workload": LazyCommand(
            "Run jobs with the options of xpk.", "tpufleet_migration.workload:workload"
        ),
        "demo": LazyCommand("Show a job that is preempted and finishes.", "jobs.demo:demo"),
    },
    "Slices": {
        "slices": LazyCommand("List slices.", "slices.slices:slices"),
        "find": LazyCommand("Find slices by type, and room in pools.", "slices.inventory:find"),
        "pool": LazyCommand("Manage pools of slices.", "slices.pool:pool"),
        "adopt": LazyCommand("Use a TPU VM made by hand in a pool.", "slices.adopt:adopt"),
        "unregister": LazyCommand("Give an adopted TPU VM back.", "slices.adopt:unregister"),
        "reservations": LazyCommand(
            "List and end reservations.", "slices.reservations:reservations"
        ),
        "release": LazyCommand(
            "Release a reservation, slice or location.", "slices.reservations:release"
        ),
        "budget": LazyCommand("Show budgets and what was spent of them.", "slices.budget:budget"),
        "stock": LazyCommand("Show capacity granted and refused, by zone.", "slices.stock:stock"),
        "types": LazyCommand("List TPU types.", "slices.types:types"),
        "exec": LazyCommand("Run a command on the hosts of a slice.", "slices.exec:exec_"),
        "ssh": LazyCommand("Open a shell on a host, through gcloud.", "slices.ssh:ssh"),
        "doctor": LazyCommand("Diagnose and repair a slice.", "slices.doctor:doctor"),
        "rules": LazyCommand("Show the recovery rules.", "jobs.rules:rules"),
        "vm": LazyCommand("Manage TPU VMs without a server.", "vm.group:vm"),
    },
    "Settings": {
        "config": LazyCommand("Show and change settings.", "settings.preferences:config"),
        "alias": LazyCommand(
            "Aliases of config paths and TPU types.", "settings.preferences:alias"
        ),
        "dir": LazyCommand("Numbered working directories.", "settings.preferences:folders"),
        "view": LazyCommand("Saved queries of `tpu jobs`.", "settings.preferences:view"),
        "notify": LazyCommand(
            "Messages about jobs: webhook, Slack, e-mail.", "settings.notify:notify"
        ),
        "secret": LazyCommand("Manage values that jobs get by name.", "settings.users:secret"),
        "token": LazyCommand("Manage API tokens.", "settings.users:token"),
        "completion": LazyCommand(
            "Print a shell's completion script.", "settings.completion:completion"
        ),
        "tldr": LazyCommand("Print worked examples.", "settings.tldr:tldr"),
        "version": LazyCommand("Print the version.", "settings.version:version"),
    },
    "Operators": {
        "status": LazyCommand(
            "Show the state of the server and its providers.", "operators.status:status"
        ),
        "init": LazyCommand("Set up a cloud project, step by step.", "operators.init:init"),
        "check": LazyCommand(
            "Check the cloud project: `tpu check cloud`.", "operators.check:check"
        ),
        "serve": LazyCommand("Run the control plane.", "operators.serve:serve"),
        "user": LazyCommand("Manage users and roles.", "settings.users:user"),
        "audit": LazyCommand("Print the audit log.", "operators.audit:audit"),
        "backup": LazyCommand("Write a backup of the server to a file.", "operators.backup:backup"),
        "restore": LazyCommand("Restore a backup into a new server.", "operators.backup:restore"),
        "bundle": LazyCommand(
            "Build what TPU hosts install, and upload it.", "operators.bundle:bundle"
        ),
        "deploy": LazyCommand("Run the server on a VM or on GKE.", "operators.deploy:deploy"),
        "agent": LazyCommand("Run the agent of one host.", "operators.agent:agent"),
        "fault": LazyCommand("Inject a fault into a simulated slice.", "slices.fault:fault"),
    },
}
CLUSTER = "tpufleet.views.cli.cluster:cluster"  # a group to which several distributions contribute
COMMAND_TABLES = "tpufleet.commands"  # entry points: by section, the commands of a distribution

NEARNESS = 0.7  # of a word to a command that it may mean
TITLE_WIDTH = 13  # column of section titles in `tpu --help`, with its margins
HELP = """Run JAX jobs on Cloud TPUs to completion. `tpu demo` simulates one here."""
EPILOG = "`tpu help CMD` explains a command; `tpu tldr CMD` shows examples of it."


def sections() -> dict[str, dict[str, LazyCommand]]:
    """The commands of all installed distributions."""
    merged = {title: dict(commands) for title, commands in SECTIONS.items()}
    for table in registered(COMMAND_TABLES):
        for title, commands in table.items():
            merged[title].update(commands)
    return merged


def commands() -> dict[str, LazyCommand]:
    return {name: command for section in sections().values() for name, command in section.items()}


class HintedUsageError(click.UsageError):
    """A usage error whose message already names the next step, so `--help` is not suggested."""


class LazyGroup(click.Group):
    """A group that lists its commands without loading them."""

    advice: Mapping[str, str] = {}  # by words that are no commands

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

        names = [name for name in self.lazy_commands if name.startswith(incomplete)]
        items = [CompletionItem(name, help=self.lazy_commands[name].help) for name in names]
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
            if advice := self.advice.get(name):
                hint = advice
            elif close:
                hint = f"did you mean `{path} {close[0]}`?"
            raise HintedUsageError(f"unknown command {name!r}; {hint}")
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, lazy.help) for name, lazy in commands.items()])


class RootGroup(LazyGroup):
    """`tpu`: its help fits one screen, and former names of commands lead to today's."""

    advice = FOREIGN_NAMES

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        # Some former names look like options, and some expand to an option of this group.
        if args and args[0] == "help":
            args = [*args[1:], "--help"]
        elif args and args[0].startswith("-"):
            args = _translated(args)
        return super().parse_args(context, args)

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(context, _translated(args))

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        (everyday, commands), *others = self.sections.items()
        with formatter.section(everyday):
            formatter.write_dl([(name, lazy.help) for name, lazy in commands.items()])
        with formatter.section("More"):
            width = formatter.width - TITLE_WIDTH
            for title, names in others:
                # click would break a name at its hyphen.
                first, *rest = textwrap.wrap(", ".join(names), width, break_on_hyphens=False)
                formatter.write_dl([(f"{title:<{TITLE_WIDTH - 4}}", first)])
                for line in rest:
                    formatter.write(f"{'':{TITLE_WIDTH}}{line}\n")

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(context, formatter)
        click.Command.format_options(self, context, formatter)


def _translated(args: list[str]) -> list[str]:
    """With a former name replaced by today's command, after a hint; or an error that says what to
    use instead."""
    former = FORMER_NAMES.get(args[0])
    rest = args[1:]
    if args[0] == "queue" and rest and QUEUED_TYPE.fullmatch(rest[0]):
        click.echo(f"hint: to queue a job is now `tpu run --detach {rest[0]}`", err=True)
        end = rest.index("--") if "--" in rest else len(rest)
        args = ["run", *rest[:end], "-q", *rest[end:]]
        rest = args[1:]
    if args[0] in LISTINGS and not {"-h", "--help", "cloud"} & {*rest[:1]}:
        rest, hints = listing_arguments(rest)
        for hint in hints:
            click.echo(f"hint: {hint}", err=True)
        if former is None and rest:
            shown = " ".join(["jobs", *rest])
            click.echo(f"hint: `tpu {' '.join(args)}` is now `tpu {shown}`", err=True)
            return ["jobs", *rest]
    if isinstance(former, Unsupported):
        raise HintedUsageError(f"no command {args[0]!r}: {former.reason}\n  next: {former.instead}")
    rest = _understood(args[0], rest)
    if former is None:
        return [args[0], *rest]
    note = f" ({former.note})" if former.note else ""
    click.echo(f"hint: `tpu {args[0]}` is now `tpu {' '.join(former.arguments)}`{note}", err=True)
    return [*former.arguments, *rest]


def _understood(verb: str, args: list[str]) -> list[str]:
    """Without a user among the words; an error when a job is named instead of a node."""
    for word, reason in DROPPED_WORDS.get(verb, {}).items():
        if word in args:
            click.echo(f"hint: {word} is not needed: {reason}", err=True)
            args = [each for each in args if each != word]
    replaced = REPLACED_WORDS.get(verb, {})
    args = [replaced.get(word, word) for word in args]
    if verb in FORMER_NAMES:
        for word in [word for word in args if word in DROPPED_FLAGS]:
            click.echo(f"hint: {word} is not needed: {DROPPED_FLAGS[word]}", err=True)
            args = [each for each in args if each != word]
    if not args or COMPLETION_VARIABLE in os.environ or {"-h", "--help"} & {*args}:
        return args
    from tpufleet_migration import former_users  # imports what connects to the server

    if verb in former_users.OF_NODES:
        former_users.refuse_job(verb, args)
    return former_users.without_user(verb, args) if verb in former_users.WITH_USER else args


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
                help="Control plane (default: TPUFLEET_SERVER, or this machine's).",
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
        from tpufleet.views.cli.settings.version import version

        context.invoke(version, as_json=False)
        context.exit()


@click.pass_context
def _remember_server(context: click.Context, server: str | None) -> None:
    """Subcommands read it from the context: only they read the settings."""
    context.meta["tpufleet.server"] = server

"""The `tpu` command itself: a table of subcommands, each imported only when it is called.

`tpu --help` must answer at once, so nothing but click and the standard library is imported here.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import click


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A subcommand that is loaded when it is needed."""

    section: str
    words: str  # its line in `tpu --help`
    load: Callable[[], click.Command]


def lazy_command(section: str, words: str, where: str) -> LazyCommand:
    """`where` is `module:name`."""

    def load() -> click.Command:
        module, _, name = where.partition(":")
        return getattr(importlib.import_module(module), name)

    return LazyCommand(section, words, load)


class LazyGroup(click.Group):
    """A group that knows its commands by name before it loads them."""

    def __init__(
        self, *, verbs: Mapping[str, LazyCommand], aliases: Mapping[str, str], **attributes: object
    ) -> None:
        super().__init__(**attributes)  # type: ignore[arg-type]
        self.verbs, self.aliases = verbs, aliases

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        found = self.verbs.get(self.aliases.get(name, name))
        return found.load() if found is not None else None

    def resolve_command(self, context: click.Context, args: list[str]) -> tuple:
        name = args[0]
        if self.get_command(context, name) is None and not name.startswith("-"):
            close = difflib.get_close_matches(name, [*self.verbs, *self.aliases], n=1)
            cure = f"did you mean `tpu {close[0]}`?" if close else "`tpu --help` lists them all"
            raise click.UsageError(f"there is no command {name!r}; {cure}")
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for section in dict.fromkeys(found.section for found in self.verbs.values()):
            with formatter.section(section):
                formatter.write_dl(
                    [(name, v.words) for name, v in self.verbs.items() if v.section == section]
                )


HERE = "tpufleet.views.cli"
RUN, LOOK, CHANGE, FLEET, PEOPLE = (
    "Run jobs", "See what happens", "Change a job", "The fleet", "People and secrets",
)  # fmt: skip

COMMANDS: dict[str, LazyCommand] = {
    "run": lazy_command(
        RUN, "Run a command on a TPU slice and follow it.", f"{HERE}.submitting:run"
    ),
    "submit": lazy_command(RUN, "Submit the jobs in a file.", f"{HERE}.submitting:submit"),
    "jobs": lazy_command(LOOK, "List jobs, newest first.", f"{HERE}.jobs:jobs"),
    "show": lazy_command(LOOK, "Everything about one job.", f"{HERE}.jobs:show"),
    "logs": lazy_command(LOOK, "What a job's hosts printed.", f"{HERE}.logs:logs"),
    "events": lazy_command(LOOK, "What happened, in words.", f"{HERE}.logs:events"),
    "why": lazy_command(LOOK, "Why a job waits, or why it ended.", f"{HERE}.jobs:why"),
    "cancel": lazy_command(CHANGE, "Stop jobs for good.", f"{HERE}.changing:cancel"),
    "resume": lazy_command(CHANGE, "Go on from the last checkpoint.", f"{HERE}.changing:resume"),
    "rerun": lazy_command(CHANGE, "Start afresh with the same code.", f"{HERE}.changing:rerun"),
    "clean": lazy_command(CHANGE, "Delete what ended jobs left.", f"{HERE}.cleaning:clean"),
    "slices": lazy_command(FLEET, "List the slices that we hold.", f"{HERE}.fleet:slices"),
    "pool": lazy_command(FLEET, "Bounded claims on capacity.", f"{HERE}.pools:pool"),
    "cost": lazy_command(FLEET, "What was paid for, and what was lost.", f"{HERE}.costs:cost"),
    "stock": lazy_command(FLEET, "What was granted and refused.", f"{HERE}.costs:stock"),
    "types": lazy_command(FLEET, "List the TPU types.", f"{HERE}.fleet:types"),
    "exec": lazy_command(FLEET, "Run a command on the hosts of a slice.", f"{HERE}.hosts:exec_"),
    "ssh": lazy_command(FLEET, "A shell on a host, through gcloud.", f"{HERE}.hosts:ssh"),
    "doctor": lazy_command(
        FLEET, "Find what ails a slice, and mend it.", f"{HERE}.doctoring:doctor"
    ),
    "fault": lazy_command(FLEET, "Hurt a slice on purpose, as a drill.", f"{HERE}.fleet:fault"),
    "secret": lazy_command(PEOPLE, "Values that jobs get by name.", f"{HERE}.people:secret"),
    "user": lazy_command(PEOPLE, "Who may use this fleet.", f"{HERE}.people:user"),
    "token": lazy_command(PEOPLE, "Credentials of users.", f"{HERE}.people:token"),
}

HELP = """Submit a JAX job once; it finishes.

tpu runs jobs on TPU slices that come and go. When a slice is taken away, it gets another one and
goes on from the last checkpoint. Without any cloud, slices are simulated on this machine.

\b
Try it:
  tpu demo
  tpu run v5e-16 --spot -- python train.py lr=0.01
  tpu jobs
"""


def root(extra: Mapping[str, LazyCommand], aliases: Mapping[str, str]) -> LazyGroup:
    """The whole command, with the verbs that the caller adds."""
    verbs = {**COMMANDS, **extra}
    return LazyGroup(
        name="tpu",
        verbs=verbs,
        aliases=aliases,
        help=HELP,
        params=[
            click.Option(
                ["--server"],
                metavar="URL",
                help="Control plane to talk to (default: TPUFLEET_SERVER, then the config file, "
                "then the one on this machine).",
            )
        ],
        callback=_remember,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


@click.pass_context
def _remember(context: click.Context, server: str | None) -> None:
    """Subcommands take it from the context: only they read the settings."""
    context.meta["tpufleet.server"] = server

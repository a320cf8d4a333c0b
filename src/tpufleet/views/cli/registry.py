"""The table of `tpu` commands, each imported only when it is called.

A command is one module with its options beside it, and one line in this table. `tpu --help` must
respond at once, so nothing but click and the standard library is imported here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

import click

from tpufleet.views.cli.former_names import DESTRUCTIVE, FORMER_NAMES, Unsupported

PACKAGE = "tpufleet.views.cli"


@dataclass(frozen=True, slots=True)
class LazyCommand:
    help: str  # its line in `tpu --help`
    target: str  # `module:attribute` below PACKAGE

    def load(self) -> click.Command:
        module, _, attribute = self.target.partition(":")
        command: click.Command = getattr(importlib.import_module(f"{PACKAGE}.{module}"), attribute)
        return command


# By section of `tpu --help`, in the order shown.
SECTIONS: dict[str, dict[str, LazyCommand]] = {
    "Run jobs": {
        "run": LazyCommand("Run a command on a TPU slice and follow it.", "submit:run"),
        "submit": LazyCommand("Submit the jobs in a file.", "submit:submit"),
        "demo": LazyCommand("Show a job that is preempted and finishes.", "demo:demo"),
        "extract": LazyCommand("Extract activations, each sample once.", "extract:extract"),
        "workload": LazyCommand("Run jobs with the options of xpk.", "workload:workload"),
        "submit-code": LazyCommand("Submit code through Firestore.", "submit_code:submit_code"),
    },
    "Inspect jobs": {
        "jobs": LazyCommand("List jobs, newest first.", "jobs:jobs"),
        "show": LazyCommand("Show one job: spec, attempts, slices, hosts.", "jobs:show"),
        "logs": LazyCommand("Print the logs of a job.", "logs:logs"),
        "events": LazyCommand("Print events of a job or of the fleet.", "logs:events"),
        "why": LazyCommand("Explain why a job waits or why it ended.", "jobs:why"),
        "queue": LazyCommand("List and reorder waiting jobs.", "queue:queue"),
        "metrics": LazyCommand("Show the metrics of a job over time.", "compare:metrics"),
        "compare": LazyCommand("Compare jobs: config, code, metrics, curves.", "compare:compare"),
        "profile": LazyCommand("Record a JAX profile of a running job.", "profile:profile"),
        "tensorboard": LazyCommand("Open jobs in TensorBoard.", "tensorboard:tensorboard"),
        "dash": LazyCommand("Open the web page.", "dash:dash"),
    },
    "Change jobs": {
        "cancel": LazyCommand("Cancel jobs.", "cancel:cancel"),
        "resume": LazyCommand("Continue a job from its last checkpoint.", "resume:resume"),
        "rerun": LazyCommand("Run a job again from the beginning.", "resume:rerun"),
        "tag": LazyCommand("Add or remove tags of a job.", "edit:tag"),
        "note": LazyCommand("Set or print the notes of a job.", "edit:note"),
        "rename": LazyCommand("Give a job another name.", "edit:rename"),
        "priority": LazyCommand("Set the priority of a job.", "edit:priority"),
        "archive": LazyCommand("Hide ended jobs; deletes nothing.", "archive:archive"),
        "unarchive": LazyCommand("List archived jobs again.", "archive:unarchive"),
        "purge": LazyCommand("Delete logs, results and code of ended jobs.", "archive:purge"),
    },
    "Fleet": {
        "status": LazyCommand("Show the state of the server and its providers.", "status:status"),
        "slices": LazyCommand("List slices.", "slices:slices"),
        "inventory": LazyCommand("Slices, pools and notes in one table.", "inventory:inventory"),
        "find": LazyCommand("Find slices by type, and room in pools.", "inventory:find"),
        "pool": LazyCommand("Manage pools of slices.", "pool:pool"),
        "reserve": LazyCommand("Reserve slices of a pool for a time.", "reservations:reserve"),
        "reservations": LazyCommand("List and end reservations.", "reservations:reservations"),
        "release": LazyCommand("Release a reservation or a held slice.", "reservations:release"),
        "cost": LazyCommand("Show chip hours and cost.", "cost:cost"),
        "budget": LazyCommand("Show budgets and what was spent of them.", "budget:budget"),
        "stock": LazyCommand("Show capacity granted and refused, by zone.", "stock:stock"),
        "types": LazyCommand("List TPU types.", "types:types"),
        "exec": LazyCommand("Run a command on the hosts of a slice.", "exec:exec_"),
        "ssh": LazyCommand("Open a shell on a host, through gcloud.", "ssh:ssh"),
        "init": LazyCommand("Set up a cloud project, step by step.", "init:init"),
        "check": LazyCommand("Check the cloud project: `tpu check cloud`.", "check:check"),
        "doctor": LazyCommand("Diagnose and repair a slice.", "doctor:doctor"),
        "fault": LazyCommand("Inject a fault into a simulated slice.", "fault:fault"),
        "rules": LazyCommand("Show the recovery rules.", "rules:rules"),
    },
    "Users and secrets": {
        "secret": LazyCommand("Manage values that jobs get by name.", "users:secret"),
        "user": LazyCommand("Manage users and roles.", "users:user"),
        "token": LazyCommand("Manage API tokens.", "users:token"),
        "audit": LazyCommand("Print the audit log.", "audit:audit"),
    },
    "Preferences": {
        "config": LazyCommand("Show and change settings.", "preferences:config"),
        "alias": LazyCommand("Aliases of config paths and TPU types.", "preferences:alias"),
        "dir": LazyCommand("Numbered working directories.", "preferences:folders"),
        "view": LazyCommand("Saved queries of `tpu jobs`.", "preferences:view"),
    },
    "TPU VMs without a server": {
        "fleet": LazyCommand("Manage nodes over zones and workers.", "vm.fleet:fleet"),
        "apply": LazyCommand("Create a node, with retries.", "vm.nodes:apply"),
        "reapply": LazyCommand("Delete a node and create it again.", "vm.nodes:reapply"),
        "delete": LazyCommand("Delete a node.", "vm.nodes:delete"),
        "restart": LazyCommand("Stop and start a node.", "vm.nodes:restart"),
        "describe": LazyCommand("Show everything about a node.", "vm.nodes:describe"),
        "check-status": LazyCommand("Print the state of a node.", "vm.nodes:check_status"),
        "check-env": LazyCommand("Check which chips JAX sees on a node.", "vm.repair:check_env"),
        "solve": LazyCommand("Repair a node.", "vm.repair:solve"),
        "mount-disk": LazyCommand("Attach and mount data disks.", "vm.setup:mount_disk"),
        "set-wandb": LazyCommand("Install a Weights & Biases API key.", "vm.setup:set_wandb"),
        "lian": LazyCommand("Open a shell on a host of a node.", "vm.shell:lian"),
        "test": LazyCommand("Run typed lines on every host of a node.", "vm.shell:test"),
    },
    "Servers": {
        "serve": LazyCommand("Run the control plane.", "serve:serve"),
        "backup": LazyCommand("Write a backup of the server to a file.", "backup:backup"),
        "restore": LazyCommand("Restore a backup into a new server.", "backup:restore"),
        "agent": LazyCommand("Run the agent of one host.", "agent:agent"),
        "deploy": LazyCommand("Run the server on a VM or on GKE.", "deploy:deploy"),
        "cluster": LazyCommand("Create GKE environments; run one here.", "cluster:cluster"),
        "provisioner": LazyCommand("Create node pools for JobSets.", "provisioner:provisioner"),
        "emulator": LazyCommand("Run an emulator of the Cloud TPU API.", "emulator:emulator"),
        "bridge": LazyCommand("Run jobs from a Firestore collection.", "bridge:bridge"),
        "bundle": LazyCommand("Build what TPU hosts install, and upload it.", "bundle:bundle"),
        "version": LazyCommand("Print the version.", "version:version"),
    },
}  # fmt: skip
COMMANDS = {name: command for section in SECTIONS.values() for name, command in section.items()}

HELP = """Run JAX jobs on Cloud TPUs to completion.

When a slice is preempted, tpufleet allocates another one and resumes the job from its last
checkpoint. Without a cloud account, slices are simulated on this machine.

\b
Examples:
  tpu demo
  tpu run v5e-16 --spot -- python train.py lr=0.01
  tpu jobs
"""


class HintedUsageError(click.UsageError):
    """A usage error whose message already names the next step, so `--help` is not suggested."""


class LazyGroup(click.Group):
    """A group that lists its commands without loading them, and knows former names of them."""

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
        return lazy.load() if lazy is not None else None

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        # Some former names look like options, and some expand to an option of this group.
        if args and args[0] == "help":
            args = [*args[1:], "--help"]
        elif args and (args[0].startswith("-") or args[0] == "tldr"):
            args = _translated(args)
        return super().parse_args(context, args)

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        args = _translated(args)
        name = args[0]
        if name not in self.lazy_commands and not name.startswith("-"):
            import difflib

            safe = [each for each in self.lazy_commands if each not in DESTRUCTIVE]
            close = difflib.get_close_matches(name, safe, n=1)
            hint = f"did you mean `tpu {close[0]}`?" if close else "`tpu --help` lists all commands"
            raise HintedUsageError(f"unknown command {name!r}; {hint}")
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, lazy.help) for name, lazy in commands.items()])


def _translated(args: list[str]) -> list[str]:
    """With a former name replaced by today's command, after a hint; or an error that says what to
    use instead."""
    former = FORMER_NAMES.get(args[0])
    if former is None:
        return args
    if isinstance(former, Unsupported):
        raise HintedUsageError(f"no command {args[0]!r}: {former.reason}\n  next: {former.instead}")
    note = f" ({former.note})" if former.note else ""
    click.echo(f"hint: `tpu {args[0]}` is now `tpu {' '.join(former.arguments)}`{note}", err=True)
    return [*former.arguments, *args[1:]]


def root() -> LazyGroup:
    """The `tpu` command."""
    return LazyGroup(
        name="tpu",
        sections=SECTIONS,
        help=HELP,
        params=[
            click.Option(
                ["--server"],
                metavar="URL",
                help="Control plane to connect to (default: TPUFLEET_SERVER, then the config "
                "file, then the one on this machine).",
            )
        ],
        callback=_remember_server,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


@click.pass_context
def _remember_server(context: click.Context, server: str | None) -> None:
    """Subcommands read it from the context: only they read the settings."""
    context.meta["tpufleet.server"] = server

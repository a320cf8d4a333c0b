"""`tpu tldr`: worked examples by task."""

from __future__ import annotations

from dataclasses import dataclass

import click

from tpufleet.errors import BadInput
from tpufleet.views.cli import registry
from tpufleet.views.cli.output import json_option, print_json
from tpufleet_migration.former_names import FORMER_NAMES, Renamed


@dataclass(frozen=True, slots=True)
class Example:
    task: str
    line: str


START = (
    Example("See a job that is preempted and finishes, on this machine", "tpu demo"),
    Example(
        "Run a script on 16 chips of spot capacity, and follow it",
        "tpu run v5e-16 --spot -- python train.py lr=0.01",
    ),
    Example("Submit the jobs of a file and go on", "tpu submit sweep.yaml"),
    Example("What do my jobs do?", "tpu jobs"),
    Example("Why does it wait, or why did it end?", "tpu why train"),
    Example("Follow the output of all hosts", "tpu logs -f train"),
    Example("Continue after fixing the code", "tpu resume train --new-code ."),
    Example("Who is ahead of me?", "tpu queue"),
    Example("Stop it", "tpu cancel train"),
)
EXAMPLES: dict[str, tuple[Example, ...]] = {
    "run": (
        Example("One slice, followed until it ends", "tpu run v5e-16 -- python train.py"),
        Example(
            "Spot first, on demand where there is none",
            "tpu run v5e-16 --spot --on-demand -- python train.py",
        ),
        Example(
            "Four slices in one of two zones, at most 12 hours",
            "tpu run v6e-64 --slices 4 --zone us-east5-b --zone us-east5-a --timeout 12h "
            "-- python train.py",
        ),
        Example(
            "A secret as environment variable, and tags",
            "tpu run v4-32 --secret WANDB_API_KEY=wandb --tag sweep-3 -- python train.py",
        ),
        Example("Only check it, and estimate the cost", "tpu run v5e-16 --dry-run -- python x.py"),
    ),
    "jobs": (
        Example("Your newest jobs", "tpu jobs"),
        Example("What runs, of everybody", "tpu jobs --all-users state:live"),
        Example("Failures of a sweep, this week", "tpu jobs 'tag:sweep-* state:failed since:7d'"),
        Example("The best runs", "tpu jobs 'loss<0.3 tag:sweep-3'"),
        Example("Keep a query under a name, and use it", "tpu view save best 'loss<0.3'"),
        Example("Ids for a script", "tpu jobs state:failed --json"),
    ),
    "logs": (
        Example("The output of all hosts so far", "tpu logs train"),
        Example("Follow host 3", "tpu logs -f train --host 3"),
        Example("The last lines of the attempt before", "tpu logs train --attempt 0 --tail 50"),
    ),
    "resume": (
        Example("From the last checkpoint", "tpu resume train"),
        Example("With new code from this folder", "tpu resume train --new-code ."),
        Example("On a larger slice, and changed", "tpu resume train --type v5e-64 lr=0.001"),
    ),
    "rerun": (
        Example("The same again, from the beginning", "tpu rerun train"),
        Example("With another setting and tag", "tpu rerun train lr=0.003 --tag lr-sweep"),
    ),
    "queue": (
        Example("Everything that waits, and what it waits for", "tpu queue"),
        Example("Run this one before my others", "tpu queue move train --first"),
        Example("Not yet", "tpu queue hold train"),
    ),
    "reserve": (
        Example("All slices of a pool for two hours", "tpu reserve lab --for 2h --note demo"),
        Example("One slice from 14:00", "tpu reserve lab --from 14:00 --for 90m --slices 1"),
        Example("Give it back early", "tpu release demo"),
    ),
    "vm": (
        Example(
            "Create a node, however long it takes",
            "tpu vm apply dev-1 --zone us-west4-a --type v5e-8",
        ),
        Example("Open a shell on it", "tpu vm ssh dev-1 --zone us-west4-a"),
        Example("It was preempted; create it again", "tpu vm repair dev-1 --zone us-west4-a"),
    ),
}  # fmt: skip


@click.command(epilog="\b\nExamples:\n  tpu tldr\n  tpu tldr resume\n")
@click.argument("command", required=False)
@json_option
@click.pass_context
def tldr(context: click.Context, command: str | None, as_json: bool) -> None:
    """Print worked examples, of the everyday or of one COMMAND."""
    shown = START if command is None else examples_of(context.find_root(), command)
    if as_json:
        print_json({"examples": shown})
        return
    for example in shown:
        if example.task:
            click.echo(f"# {example.task}")
        click.echo(f"{example.line}\n")
    if command is None:
        click.echo(f"Also: tpu tldr {' | '.join(EXAMPLES)}, or any other command")


def examples_of(root: click.Context, name: str) -> tuple[Example, ...]:
    """Worked ones, or those at the end of the command's help."""
    former = FORMER_NAMES.get(name)
    if isinstance(former, Renamed):
        name = former.arguments[0]
    if name in EXAMPLES:
        return EXAMPLES[name]
    if name not in registry.commands():
        raise BadInput(f"no command {name!r}; `tpu --help` lists them")
    command = registry.commands()[name].load()
    return tuple(
        Example("", line.strip())
        for line in (command.epilog or "").splitlines()
        if line.startswith("  ")
    )

"""`tpu workload`: the verbs and options of xpk, carried out as jobs.

Options are those of https://github.com/AI-Hypercomputer/xpk, `xpk workload`. Those that say
what they are have no help.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tpufleet.errors import unreadable
from tpufleet.views.cli import output
from tpufleet.views.cli.jobs import cancel as cancel_command
from tpufleet.views.cli.jobs import jobs as jobs_command
from tpufleet.views.cli.jobs import submit
from tpufleet.views.cli.output import json_option

# xpk's priority → priority of a job that maps to the Kueue class of the same rank.
PRIORITIES = {"very-low": -100, "low": -10, "medium": 0, "high": 10, "very-high": 100}
# xpk's status → states of jobs.
STATES = {
    "EVERYTHING": (),
    "FINISHED": ("succeeded", "failed", "cancelled"),
    "RUNNING": ("starting", "running", "recovering"),
    "QUEUED": ("queued", "waiting"),
    "FAILED": ("failed",),
    "SUCCESSFUL": ("succeeded",),
}
status_option = click.option(
    "--filter-by-status",
    "status",
    type=click.Choice(list(STATES)),
    default="EVERYTHING",
    show_default=True,
)


def _accepted(*names: str) -> Callable[[Any], Any]:
    """Options that name what the server knows already: accepted, and not needed."""

    def decorate(command: Any) -> Any:
        for name in reversed(names):
            command = click.option(name, expose_value=False, hidden=True)(command)
        return command

    return decorate


@click.group()
def workload() -> None:
    """Workloads with the options of xpk. Each is a job: `tpu jobs`, `tpu logs` and others work."""


@workload.command(
    epilog="\b\nExample:\n  tpu workload create --workload hello --tpu-type v5litepod-16 \\\n"
    '    --num-slices 2 --command "python train.py"\n'
)
@click.option("--workload", "name", required=True)
@click.option("--command", required=True, help="Command to run on each host.")
@click.option("--tpu-type", "--device-type", "tpu_type", required=True)
@click.option("--num-slices", default=1, show_default=True)
@click.option(
    "--priority", type=click.Choice(list(PRIORITIES)), default="medium", show_default=True
)
@click.option("--max-restarts", default=0, show_default=True, help="Restarts after a failure.")
@click.option("--termination-grace-period-seconds", "grace", type=int)
@click.option("--script-dir", default=".", help="Folder to copy to hosts.", show_default=True)
@output.repeatable("--env", metavar="NAME=VALUE")
@click.option("--env-file", type=click.Path(path_type=Path), help="File of NAME=VALUE lines.")
@click.option(
    "--docker-image", "--base-docker-image", "image", help="Container image, with tpufleet."
)
@click.option("--zone", "zone")
@click.option("--spot", is_flag=True)
@click.option("--on-demand", is_flag=True)
@click.option("--reservation", help="Reserved capacity; the server knows the reservation.")
@_accepted("--cluster", "--project", "--scheduler", "--ttl-seconds-after-finished")
@click.option("--dry-run", is_flag=True, help="Validate without submitting.")
@json_option
@click.pass_context
def create(context: click.Context, command: str, tpu_type: str, **chosen: Any) -> None:
    """Submit a workload and return. Preemptions are retried, whatever --max-restarts is."""
    options = ["--name", chosen["name"], "--slices", str(chosen["num_slices"]), "--detach"]
    options += ["--workdir", chosen["script_dir"]]
    options += ["--priority", str(PRIORITIES[chosen["priority"]])]
    options += ["--retries", f"failure={chosen['max_restarts']}"]
    for variable in (*chosen["env"], *_env_file(chosen["env_file"])):
        options += ["--env", variable]
    if chosen["grace"] is not None:
        options += ["--set", f"grace={chosen['grace']}s"]
    if chosen["zone"]:
        options += ["--zone", chosen["zone"]]
    if chosen["image"]:
        options += ["--set", f"pod.image={chosen['image']}"]
    flags = {"spot": "--spot", "on_demand": "--on-demand", "reservation": "--reserved"}
    flags["dry_run"] = "--dry-run"
    options += [flag for name, flag in flags.items() if chosen[name]]
    args = [*options, tpu_type, "--", command]
    with submit.run.make_context("run", args, parent=context) as inner:
        submit.run.invoke(inner)


@workload.command("list", epilog="\b\nExample:\n  tpu workload list --filter-by-status RUNNING\n")
@status_option
@click.option("--filter-by-job", "pattern", help="Only the workload of this name.")
@_accepted("--cluster", "--project", "--zone")
@json_option
@click.pass_context
def list_workloads(context: click.Context, status: str, pattern: str | None) -> None:
    """List workloads, newest first."""
    args = [f"state:{','.join(STATES[status])}"] if STATES[status] else []
    args += [f"name:{pattern}"] if pattern else []
    with jobs_command.jobs.make_context("jobs", args, parent=context) as inner:
        jobs_command.jobs.invoke(inner)


@workload.command(epilog="\b\nExample:\n  tpu workload delete --workload hello\n")
@click.option("--workload", "name", required=True)
@click.option("--force", is_flag=True, help="Accepted; a workload named here is not asked about.")
@_accepted("--cluster", "--project", "--zone")
@json_option
@click.pass_context
def delete(context: click.Context, name: str, force: bool) -> None:
    """Cancel a workload. Its logs and checkpoints are kept; `tpu archive purge` deletes them."""
    with cancel_command.cancel.make_context("cancel", [name], parent=context) as inner:
        cancel_command.cancel.invoke(inner)


def _env_file(path: Path | None) -> list[str]:
    """NAME=VALUE, or NAME alone for the value of this shell; # starts a comment."""
    if path is None:
        return []
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error, "--env-file") from error
    lines = [line.strip() for line in text.splitlines()]
    kept = [line for line in lines if line and not line.startswith("#")]
    return [line if "=" in line else f"{line}={os.environ.get(line, '')}" for line in kept]

"""The verbs that reach into one TPU VM made by hand, by ssh through gcloud: `tpu check-env`,
`solve`, `lian`, `test`, `mount-disk` and `set-wandb`. What runs there is in `remotely`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from typing import Any

import click

from tpufleet.errors import BadInput, FleetError
from tpufleet.model import fleets
from tpufleet.views.cli import gcloud, output
from tpufleet.views.cli.output import json_option
from tpufleet.views.cli.vm import remote_commands
from tpufleet.views.cli.vm.fleet import (
    NODE_OPTIONS,
    RETRY_OPTIONS,
    YES_OPTION,
    Nodes,
    OpenNodes,
    interruptible,
    options,
    show_outcomes,
)
from tpufleet.views.cli.vm.nodes import (
    NODE_ARGUMENTS,
    RETRY_ARGUMENTS,
    node_command,
    node_request_from,
    retry_limits,
    undo_hint,
    zone_of,
)

_NFS = re.compile(r"[A-Za-z0-9.:_\[\]-]+:/\S*")
_KEY = re.compile(r"[\x21-\x7e]{20,300}")


def shell_commands(open_nodes: OpenNodes) -> dict[str, click.Command]:
    @node_command("check-env", "tpu check-env tpu-us-central1-a-0")
    @options(NODE_ARGUMENTS, json_option)
    def check_env(name: str, zone: str | None, project: str | None, as_json: bool) -> int:
        """Ask JAX on every host of a node which chips it sees, by ssh through gcloud.

        The exit status is 1 when it sees none.
        """
        node = _node(open_nodes(project), name, zone)
        finding = remote_commands.check_devices(node)
        show_outcomes([finding], as_json)
        return int(finding.result != "good")

    @node_command("solve", "tpu solve tpu-us-central1-a-0 --yes")
    @options(NODE_ARGUMENTS, RETRY_ARGUMENTS, NODE_OPTIONS, RETRY_OPTIONS, YES_OPTION, json_option)
    @click.pass_context
    def solve(context: click.Context, name: str, zone: str | None, project: str | None,
              yes: bool, as_json: bool, **given: Any) -> int:  # fmt: skip
        """Make one node usable: made again if it was taken, freed of stale locks, looked at again.

        No process is ended. The exit status is 1 when it still is not usable.
        """
        nodes = open_nodes(project)
        node = _node(nodes, name, zone)
        found = nodes.get(node.zone, name)
        if found.state in fleets.GONE_STATES:
            wish = node_request_from(context, given, found)
            output.confirm(f"{name} is {fleets.display_state(found.state)}. Make it again?", yes)
            with interruptible(undo_hint(name, node.zone)):
                nodes.delete(node.zone, name)
                nodes.create(node.zone, name, wish, *retry_limits(given))
        elif found.state != "READY":
            raise _not_ready(name, found.state)
        finding = remote_commands.check_devices(node)
        if finding.result == "chips in use":
            output.print_status(f"{name}: {finding.words}; taking away stale locks")
            remote_commands.remove_stale_locks(node)
            finding = remote_commands.check_devices(node)
        show_outcomes([finding], as_json)
        return int(finding.result != "good")

    @node_command("lian", "tpu lian tpu-us-central1-a-0 all --command='df -h /'")
    @options(
        NODE_ARGUMENTS,
        click.argument("worker", default="0"),
        click.option("--command", metavar="TEXT", help="Run this there, instead of a shell."),
        click.option("--dry-run", is_flag=True, help="Only show the gcloud command."),
    )
    def lian(name: str, zone: str | None, project: str | None, worker: str, command: str | None,
             dry_run: bool) -> None:  # fmt: skip
        """Open a shell on host WORKER (0) of a node, by ssh through gcloud; `all` with a command.

        TEXT is given to the shell there as it stands. For slices of a server see `tpu exec`.
        """
        if not re.fullmatch(r"\d+|all", worker):
            raise BadInput(f"{worker!r} is no host; give its number, or all")
        if worker == "all" and command is None:
            raise BadInput("a shell on all hosts at once cannot be had; give --command")
        node = _node(open_nodes(project), name, zone)
        argv = gcloud.ssh_script(node.name, node.zone, node.project, worker, command)
        if dry_run:
            click.echo(shlex.join(argv))
            return
        gcloud.require_gcloud()
        os.execvp(argv[0], argv)

    @node_command("test", "tpu test tpu-us-central1-a-0 --python")
    @options(
        NODE_ARGUMENTS, click.option("--python", is_flag=True, help="Lines of Python, not of bash.")
    )
    def test(name: str, zone: str | None, project: str | None, python: bool) -> None:
        """Run each line that you type on every host of a node, by ssh; Ctrl-D ends it.

        Lines are on their own: none knows the variables of another.
        """
        node = _node(open_nodes(project), name, zone)
        gcloud.require_gcloud()
        shell = ("python3", "-c") if python else ("bash", "-c")
        while line := _line(f"{name}{'>>>' if python else '$'} "):
            if line.strip():
                status, said = remote_commands.run_on_all_hosts(node, *shell, line.rstrip("\n"))
                click.echo(said.rstrip("\n"))
                if status:
                    output.print_status(f"exit status {status}")

    @node_command("mount-disk", "tpu mount-disk tpu-us-central1-a-0")
    @options(
        NODE_ARGUMENTS,
        click.option("--disk", "disks", multiple=True, metavar="projects/…/disks/…",
                     help="A disk to attach first (default: tpu_vm.data_disks)."),
        click.option("--read-write", is_flag=True, help="Attach it for writing; one host alone."),
        click.option("--nfs", metavar="SERVER:/EXPORT", help="Mount this instead of disks."),
        click.option("--at", "target", default="/mnt/nfs", show_default=True,
                     help="Where, for --nfs."),
        click.option("--force", is_flag=True, help="Mount again what is mounted."),
        json_option,
    )  # fmt: skip
    def mount_disk(name: str, zone: str | None, project: str | None, disks: tuple[str, ...],
                   read_write: bool, nfs: str | None, target: str, force: bool,
                   as_json: bool) -> int:  # fmt: skip
        """Attach data disks to a node and mount them on every host, at /mnt/disks/1, 2, …

        With --nfs, mount a file server instead. What is mounted is left alone, and a disk without
        a file system is never given one. Slices of a server do this by themselves when they boot.
        """
        if nfs and not _NFS.fullmatch(nfs):
            raise BadInput(f"--nfs: {nfs!r} is not SERVER:/EXPORT")
        if not target.startswith("/"):
            raise BadInput(f"--at: {target!r} does not begin with /")
        nodes = open_nodes(project)
        node = _ready(nodes, name, zone)
        if nfs:
            outcome = remote_commands.mount_nfs(node, nfs, target, force)
        else:
            for disk in nodes.attach_disks(node.zone, name, disks, not read_write):
                output.print_status(f"{name}: attached {disk}")
            outcome = remote_commands.mount_disks(node, force)
        show_outcomes([outcome], as_json)
        return int(outcome.result != "mounted")

    @node_command("set-wandb", "tpu set-wandb tpu-us-central1-a-0 < key.txt")
    @options(NODE_ARGUMENTS, json_option)
    def set_wandb(name: str, zone: str | None, project: str | None, as_json: bool) -> int:
        """Let programs on every host of a node speak to Weights & Biases.

        The key is read from standard input, or asked for; it is never an argument, here or there.
        Jobs get theirs from the server: `tpu secret set wandb`.
        """
        nodes = open_nodes(project)
        node = _ready(nodes, name, zone)
        if sys.stdin.isatty():
            key = click.prompt("key", hide_input=True, err=True)
        else:
            key = sys.stdin.read().strip()
        if not _KEY.fullmatch(key):
            raise BadInput("this is no key of Weights & Biases; wandb.ai/authorize shows yours")
        hosts = max(1, len(nodes.get(node.zone, name).addresses))
        outcomes = [remote_commands.log_in_to_wandb(node, host, key) for host in range(hosts)]
        show_outcomes(outcomes, as_json)
        return int(any(outcome.result != "done" for outcome in outcomes))

    made = (check_env, solve, lian, test, mount_disk, set_wandb)
    return {str(command.name): command for command in made}


def _node(nodes: Nodes, name: str, zone: str | None) -> remote_commands.NodeAddress:
    return remote_commands.NodeAddress(name=name, zone=zone_of(name, zone), project=nodes.project)


def _ready(nodes: Nodes, name: str, zone: str | None) -> remote_commands.NodeAddress:
    node = _node(nodes, name, zone)
    state = nodes.get(node.zone, name).state
    if state != "READY":
        raise _not_ready(name, state)
    return node


def _not_ready(name: str, state: str) -> FleetError:
    return FleetError(f"{name} is {fleets.display_state(state)}; try again when it is ready")


def _line(prompt: str) -> str:
    if sys.stdin.isatty():
        click.echo(prompt, nl=False, err=True)
    return sys.stdin.readline()

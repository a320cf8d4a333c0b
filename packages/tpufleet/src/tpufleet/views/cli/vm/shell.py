"""`tpu vm ssh` and `tpu vm shell`: a shell on one TPU VM, with ssh through gcloud."""

from __future__ import annotations

import os
import re
import shlex
import sys

import click

from tpufleet.errors import BadInput
from tpufleet.views.cli import gcloud, output
from tpufleet.views.cli.vm import remote_commands
from tpufleet.views.cli.vm.addresses import node_address
from tpufleet.views.cli.vm.options import NODE_ARGUMENTS, example, open_nodes, options


@click.command(epilog=example("tpu vm ssh tpu-us-central1-a-0 all --command='df -h /'"))
@options(
    NODE_ARGUMENTS,
    click.argument("worker", default="0"),
    click.option("--command", metavar="TEXT", help="Run this command line instead of a shell."),
    output.dry_run_option,
)
def ssh(
    name: str,
    zone: str | None,
    worker: str,
    command: str | None,
    dry_run: bool,
) -> None:
    """Open a shell on host WORKER (0) of a node, with ssh through gcloud.

    With --command, run TEXT in the remote shell, on one host or on `all`. For slices of a server
    use `tpu exec`.
    """
    if not re.fullmatch(r"\d+|all", worker):
        raise BadInput(f"invalid host {worker!r}; pass a number, or `all` with --command")
    if worker == "all" and command is None:
        raise BadInput("a shell needs one host; pass its number, or --command TEXT for all hosts")
    node = node_address(open_nodes(), name, zone)
    argv = gcloud.ssh_script(node.name, node.zone, node.project, worker, command)
    if dry_run:
        click.echo(shlex.join(argv))
        return
    gcloud.require_gcloud()
    os.execvp(argv[0], argv)


@click.command(epilog=example("tpu vm shell tpu-us-central1-a-0 --python"))
@options(NODE_ARGUMENTS, click.option("--python", is_flag=True, help="Python instead of bash."))
def shell(name: str, zone: str | None, python: bool) -> None:
    """Run each typed line on every host of a node, with ssh through gcloud; Ctrl-D exits.

    Each line runs in a new process and does not see the variables of others.
    """
    node = node_address(open_nodes(), name, zone)
    gcloud.require_gcloud()
    interpreter = ("python3", "-c") if python else ("bash", "-c")
    while line := _read_line(f"{name}{'>>>' if python else '$'} "):
        if line.strip():
            result = remote_commands.run_on_all_hosts(node, *interpreter, line.rstrip("\n"))
            click.echo(result.output.rstrip("\n"))
            if result.status:
                output.print_status(f"exit status {result.status}")


def _read_line(prompt: str) -> str:
    if sys.stdin.isatty():
        click.echo(prompt, nl=False, err=True)
    return sys.stdin.readline()

"""What `tpu vm` does on the hosts of one node, with ssh through gcloud: check, repair, set up, and
open shells."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import click

from tpufleet.errors import BadInput, invalid, not_found
from tpufleet.model.fleet import fleets
from tpufleet.views.cli import gcloud, output
from tpufleet.views.cli.output import example, json_option, options
from tpufleet.views.cli.vm import remote_commands
from tpufleet.views.cli.vm.options import (
    DELAY,
    TRIES,
    interruptible,
    node_address,
    open_nodes,
    ready_node,
    undo_hint,
)
from tpufleet.views.cli.vm.outcomes import NodeOutcome, NodeResult, show_outcomes

if TYPE_CHECKING:
    from tpufleet.compose.providers import ManualNodes

_NFS = re.compile(r"[A-Za-z0-9.:_\[\]-]+:/\S*")
_KEY = re.compile(r"[\x21-\x7e]{20,300}")


@click.command("check-env", epilog=example("tpu vm check-env tpu-us-central1-a-0"))
@click.argument("name")
@json_option
def check_env(name: str) -> int:
    """Check which chips JAX sees on every host of a TPU VM, with ssh through gcloud.

    The exit status is 1 when it sees none.
    """
    node = node_address(open_nodes(), name)
    outcome = remote_commands.check_devices(node)
    show_outcomes([outcome])
    return int(outcome.result is not NodeResult.OK)


@click.command(epilog=example("tpu vm repair tpu-us-central1-a-0"))
@click.argument("name")
@output.yes_option
@json_option
def repair(name: str, yes: bool) -> int:
    """Repair a TPU VM: create it again if it was preempted, remove stale locks, check the chips,
    and mount the disks of `tpu_vm.data_disks` again.

    No process is killed. The exit status is 1 when it is still unusable.
    """
    nodes = open_nodes()
    node = node_address(nodes, name)
    info = nodes.get(node.zone, name)
    if info.state in fleets.GONE_STATES:
        if not info.accelerator:
            raise not_found(f"TPU VM in {node.zone}", name, "vm fleet list")
        nodes.warn_of_server(info)
        output.confirm(f"{name} is {fleets.display_state(info.state)}. Create it again?", yes)
        with interruptible(undo_hint(name, node.zone)):
            nodes.create(node.zone, name, info.same_again(), TRIES, DELAY)
    else:
        ready_node(nodes, name)
    outcome = remote_commands.check_devices(node)
    if outcome.result is NodeResult.CHIPS_IN_USE:
        output.print_status(f"{name}: {outcome.message}; removing stale locks")
        remote_commands.remove_stale_locks(node)
        outcome = remote_commands.check_devices(node)
    outcomes = [outcome]
    if outcome.result is NodeResult.OK and nodes.has_data_disks:
        outcomes.append(_mount(nodes, node))
    show_outcomes(outcomes)
    return int(any(each.result not in (NodeResult.OK, NodeResult.MOUNTED) for each in outcomes))


def _mount(
    nodes: ManualNodes,
    node: gcloud.NodeAddress,
    disks: tuple[str, ...] = (),
    *,
    read_only: bool = True,
    force: bool = False,
) -> NodeOutcome:
    for disk in nodes.attach_disks(node.zone, node.name, disks, read_only):
        output.print_status(f"{node.name}: attached {disk}")
    return remote_commands.mount_disks(node, force)


@click.command("mount-disk", epilog=example("tpu vm mount-disk tpu-us-central1-a-0"))
@options(
    click.argument("name"),
    click.option("--disk", "disks", multiple=True, metavar="projects/…/disks/…",
                 help="Disk to attach first (default: tpu_vm.data_disks)."),
    click.option("--read-write", is_flag=True, help="Attach for writing; one host only."),
    click.option("--nfs", metavar="SERVER:/EXPORT", help="Mount this NFS export instead of disks."),
    click.option("--at", "target", default="/mnt/nfs", show_default=True,
                 help="Mount point of --nfs."),
    click.option("--force", is_flag=True, help="Unmount and mount again."),
    json_option,
)  # fmt: skip
def mount_disk(
    name: str,
    disks: tuple[str, ...],
    read_write: bool,
    nfs: str | None,
    target: str,
    force: bool,
) -> int:
    """Attach data disks to a TPU VM and mount them on every host, at /mnt/disks/1, 2, …

    With --nfs, mount an NFS export instead. Mounted disks are skipped, and a disk without a file
    system is never formatted. Slices of a server mount their disks when they boot.
    """
    if nfs and not _NFS.fullmatch(nfs):
        raise invalid(nfs, "SERVER:/EXPORT", "10.0.0.2:/share", "--nfs")
    if not target.startswith("/"):
        raise invalid(target, "an absolute path", "/mnt/disk", "--at")
    nodes = open_nodes()
    node = node_address(nodes, name)
    ready_node(nodes, name)
    if nfs:
        outcome = remote_commands.mount_nfs(node, nfs, target, force)
    else:
        outcome = _mount(nodes, node, disks, read_only=not read_write, force=force)
    show_outcomes([outcome])
    return int(outcome.result is not NodeResult.MOUNTED)


@click.command("set-wandb", epilog=example("tpu vm set-wandb tpu-us-central1-a-0 < key.txt"))
@click.argument("name")
@json_option
def set_wandb(name: str) -> int:
    """Install a Weights & Biases API key on every host of a TPU VM.

    The key is read from standard input or prompted for; it is never a command-line argument. Jobs
    get theirs from the server: `tpu secret set wandb`.
    """
    nodes = open_nodes()
    node, hosts = node_address(nodes, name), ready_node(nodes, name).addresses
    key = output.read_secret("API key").strip()
    if not _KEY.fullmatch(key):
        raise BadInput(
            "invalid Weights & Biases API key; copy yours from https://wandb.ai/authorize"
        )
    outcomes = [
        remote_commands.install_wandb_key(node, host, key) for host in range(max(1, len(hosts)))
    ]
    show_outcomes(outcomes)
    return int(any(outcome.result is not NodeResult.DONE for outcome in outcomes))


@click.command(epilog=example("tpu vm ssh tpu-us-central1-a-0 all --command='df -h /'"))
@options(
    click.argument("name"),
    click.argument("worker", default="0"),
    click.option("--command", metavar="TEXT", help="Run this command line instead of a shell."),
    output.dry_run_option,
)
def ssh(
    name: str,
    worker: str,
    command: str | None,
    dry_run: bool,
) -> None:
    """Open a shell on host WORKER (0) of a TPU VM, with ssh through gcloud.

    With --command, run TEXT in the remote shell, on one host or on `all`. For slices of a server
    use `tpu exec`.
    """
    if not re.fullmatch(r"\d+|all", worker):
        raise invalid(worker, "a host", "0, or `all` with --command")
    if worker == "all" and command is None:
        raise BadInput("a shell needs one host; pass its number, or --command TEXT for all hosts")
    argv = node_address(open_nodes(), name).ssh(worker, command)
    gcloud.replace_process(argv, dry_run)


@click.command(epilog=example("tpu vm shell tpu-us-central1-a-0 --python"))
@click.argument("name")
@click.option("--python", is_flag=True, help="Python instead of bash.")
def shell(name: str, python: bool) -> None:
    """Run each typed line on every host of a TPU VM, with ssh through gcloud; Ctrl-D exits.

    Each line runs in a new process and does not see the variables of others.
    """
    node = node_address(open_nodes(), name)
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

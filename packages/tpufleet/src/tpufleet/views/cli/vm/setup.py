"""`tpu vm mount-disk` and `tpu vm set-wandb`: set up one TPU VM, with ssh through gcloud."""

from __future__ import annotations

import re
import sys

import click

from tpufleet.errors import BadInput
from tpufleet.views.cli import output
from tpufleet.views.cli.output import json_option
from tpufleet.views.cli.vm import remote_commands
from tpufleet.views.cli.vm.addresses import ready_node_address
from tpufleet.views.cli.vm.options import NODE_ARGUMENTS, example, open_nodes, options
from tpufleet.views.cli.vm.outcomes import NodeResult, show_outcomes

_NFS = re.compile(r"[A-Za-z0-9.:_\[\]-]+:/\S*")
_KEY = re.compile(r"[\x21-\x7e]{20,300}")


@click.command("mount-disk", epilog=example("tpu vm mount-disk tpu-us-central1-a-0"))
@options(
    NODE_ARGUMENTS,
    click.option("--disk", "disks", multiple=True, metavar="projects/…/disks/…",
                 help="Disk to attach first (default: tpu_vm.data_disks)."),
    click.option("--read-write", is_flag=True, help="Attach for writing; single-host nodes only."),
    click.option("--nfs", metavar="SERVER:/EXPORT", help="Mount this NFS export instead of disks."),
    click.option("--at", "target", default="/mnt/nfs", show_default=True,
                 help="Mount point of --nfs."),
    click.option("--force", is_flag=True, help="Unmount and mount again."),
    json_option,
)  # fmt: skip
def mount_disk(
    name: str,
    zone: str | None,
    disks: tuple[str, ...],
    read_write: bool,
    nfs: str | None,
    target: str,
    force: bool,
    as_json: bool,
) -> int:
    """Attach data disks to a node and mount them on every host, at /mnt/disks/1, 2, …

    With --nfs, mount an NFS export instead. Mounted disks are skipped, and a disk without a file
    system is never formatted. Slices of a server mount their disks when they boot.
    """
    if nfs and not _NFS.fullmatch(nfs):
        raise BadInput(f"--nfs: {nfs!r} is not SERVER:/EXPORT")
    if not target.startswith("/"):
        raise BadInput(f"--at: {target!r} is not an absolute path")
    nodes = open_nodes()
    node = ready_node_address(nodes, name, zone)
    if nfs:
        outcome = remote_commands.mount_nfs(node, nfs, target, force)
    else:
        for disk in nodes.attach_disks(node.zone, name, disks, not read_write):
            output.print_status(f"{name}: attached {disk}")
        outcome = remote_commands.mount_disks(node, force)
    show_outcomes([outcome], as_json)
    return int(outcome.result is not NodeResult.MOUNTED)


@click.command("set-wandb", epilog=example("tpu vm set-wandb tpu-us-central1-a-0 < key.txt"))
@options(NODE_ARGUMENTS, json_option)
def set_wandb(name: str, zone: str | None, as_json: bool) -> int:
    """Install a Weights & Biases API key on every host of a node.

    The key is read from standard input or prompted for; it is never a command-line argument. Jobs
    get theirs from the server: `tpu secret set wandb`.
    """
    nodes = open_nodes()
    node = ready_node_address(nodes, name, zone)
    if sys.stdin.isatty():
        key = click.prompt("API key", hide_input=True, err=True)
    else:
        key = sys.stdin.read().strip()
    if not _KEY.fullmatch(key):
        raise BadInput(
            "invalid Weights & Biases API key; copy yours from https://wandb.ai/authorize"
        )
    hosts = max(1, len(nodes.get(node.zone, name).addresses))
    outcomes = [remote_commands.install_wandb_key(node, host, key) for host in range(hosts)]
    show_outcomes(outcomes, as_json)
    return int(any(outcome.result is not NodeResult.DONE for outcome in outcomes))

"""`tpu vm …`: TPU VMs with your Google credentials and no server."""

from __future__ import annotations

import click

from tpufleet.views.cli.registry import LazyCommand, SharedLazyGroup

SECTIONS = {
    "One node": {
        "apply": LazyCommand("Create a node, or replace one.", "vm.nodes:apply"),
        "delete": LazyCommand("Delete a node.", "vm.nodes:delete"),
        "restart": LazyCommand("Stop and start a node.", "vm.nodes:restart"),
        "describe": LazyCommand("Show everything about a node.", "vm.nodes:describe"),
        "status": LazyCommand("Print the state of a node.", "vm.nodes:status"),
        "check-env": LazyCommand("Check which chips JAX sees on a node.", "vm.hosts:check_env"),
        "repair": LazyCommand("Repair a node.", "vm.hosts:repair"),
        "mount-disk": LazyCommand("Attach and mount data disks.", "vm.hosts:mount_disk"),
        "set-wandb": LazyCommand("Install a Weights & Biases API key.", "vm.hosts:set_wandb"),
        "ssh": LazyCommand("Open a shell on a host of a node.", "vm.hosts:ssh"),
        "shell": LazyCommand("Run typed lines on every host of a node.", "vm.hosts:shell"),
    },
    "Many nodes": {
        "fleet": LazyCommand("Manage nodes over zones and workers.", "vm.fleet:fleet"),
    },
}


vm = SharedLazyGroup(
    name="vm",
    sections=SECTIONS,
    params=[
        click.Option(["--project"], help="Google Cloud project (default: tpu_vm.project)."),
        click.Option(
            ["--zone", "--zones"],
            help="Zone, unless the name contains it (default: the only one of tpu_vm.zones). Of a "
            "fleet: zones, separated by commas (default: tpu_vm.zones).",
        ),
    ],
    help="Manage TPU VMs with your Google credentials, without a server.",
    epilog="\b\nExamples:\n  tpu vm apply dev-1 --type v5e-8 --zone us-west4-a\n"
    "  tpu vm ssh dev-1 --zone us-west4-a\n",
)

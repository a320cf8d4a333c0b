"""`tpu vm …`: TPU VMs with your Google credentials and no control plane."""

from __future__ import annotations

import click

from tpufleet.views.cli.registry import LazyCommand, LazyGroup

SECTIONS = {
    "One node": {
        "apply": LazyCommand("Create a node, with retries.", "vm.nodes:apply"),
        "reapply": LazyCommand("Delete a node and create it again.", "vm.nodes:reapply"),
        "delete": LazyCommand("Delete a node.", "vm.nodes:delete"),
        "restart": LazyCommand("Stop and start a node.", "vm.nodes:restart"),
        "describe": LazyCommand("Show everything about a node.", "vm.nodes:describe"),
        "status": LazyCommand("Print the state of a node.", "vm.nodes:status"),
        "check-env": LazyCommand("Check which chips JAX sees on a node.", "vm.repair:check_env"),
        "repair": LazyCommand("Repair a node.", "vm.repair:repair"),
        "mount-disk": LazyCommand("Attach and mount data disks.", "vm.setup:mount_disk"),
        "set-wandb": LazyCommand("Install a Weights & Biases API key.", "vm.setup:set_wandb"),
        "ssh": LazyCommand("Open a shell on a host of a node.", "vm.shell:ssh"),
        "shell": LazyCommand("Run typed lines on every host of a node.", "vm.shell:shell"),
    },
    "Many nodes": {
        "fleet": LazyCommand("Manage nodes over zones and workers.", "vm.fleet:fleet"),
    },
}


class _VmGroup(LazyGroup):
    """Takes --project anywhere among the words before `--`."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        for at, word in enumerate(args[:end]):
            if word == "--project" or word.startswith("--project="):
                count = 2 if word == "--project" else 1
                args = [*args[at : at + count], *args[:at], *args[at + count :]]
                break
        return super().parse_args(context, args)


@click.pass_context
def _remember_project(context: click.Context, project: str | None) -> None:
    context.meta["tpufleet.vm.project"] = project


vm = _VmGroup(
    name="vm",
    sections=SECTIONS,
    params=[click.Option(["--project"], help="Google Cloud project (default: tpu_vm.project).")],
    callback=_remember_project,
    help="Manage TPU VMs with your Google credentials, without a control plane.",
    epilog="\b\nExamples:\n  tpu vm apply dev-1 --type v5e-8 --zone us-west4-a\n"
    "  tpu vm ssh dev-1 --zone us-west4-a\n",
)

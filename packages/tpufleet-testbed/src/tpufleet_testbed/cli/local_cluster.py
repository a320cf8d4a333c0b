"""`tpu cluster local`: a Kubernetes cluster on this machine."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import click

from tpufleet.errors import not_available
from tpufleet.model.tpu import type_lookup
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option
from tpufleet.views.cli.registry import SharedOptions, shared_option
from tpufleet_testbed.kubernetes import binaries, cluster, emulated_gke, leader_worker_sets
from tpufleet_testbed.kubernetes.control_plane import KubernetesControlPlane
from tpufleet_testbed.kubernetes.image import builder
from tpufleet_testbed.kubernetes.node import job_namespace, node_images, real_node
from tpufleet_testbed.kubernetes.node.node_config import NodeShape

MEBIBYTE = 2**20


@click.group(
    "local",
    cls=SharedOptions,
    epilog="\b\nExamples:\n  tpu cluster local up\n  tpu cluster local status\n"
    "  tpu cluster local kubectl get pods -A\n  tpu cluster local down\n",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Folder of the cluster (default: cluster in the state folder).",
)
def local_group(folder: Path | None) -> None:
    """Run Kubernetes on this machine, with JobSet, Kueue and simulated TPU nodes.

    etcd, API server, scheduler, controllers, JobSet, Kueue and KWOK run as plain processes on
    loopback. The first start builds them with Go, which takes about ten minutes.
    """


@local_group.command("build", epilog="\b\nExample:\n  tpu cluster local build\n")
@json_option
def build() -> None:
    """Build the programs into a cache without starting them. Prints their folder.

    Needs Go 1.26 or newer and 6 GiB of disk, and takes about ten minutes the first time.
    """
    folder = str(binaries.ensure(output.print_status).folder)
    output.print_result({"folder": folder}, folder)


@local_group.command(
    "up",
    epilog="\b\nExamples:\n  tpu cluster local up\n  tpu cluster local up --gke\n"
    "  tpu cluster local up --gke --gke-plan gke.yaml\n"
    "  sudo tpu cluster local up --node\n",
)
@click.option("--node", is_flag=True, help="Add a real node that runs pods.")
@click.option(
    "--accelerator",
    default="v5e-16",
    show_default=True,
    metavar="TYPE",
    help="With --node: type of the slice that it provides.",
)
@click.option("--lws", is_flag=True, help="Install LeaderWorkerSet.")
@click.option("--gke", is_flag=True, help="Emulate GKE's node-pool API, for `tpu provisioner`.")
@click.option(
    "--gke-plan",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="With --gke: its zones, stock, quotas and delays (YAML); read again when it changes.",
)
@json_option
def up(
    node: bool, accelerator: str, lws: bool, gke: bool, gke_plan: Path | None,
) -> None:  # fmt: skip
    """Start the cluster and print the path of its kubeconfig.

    A real node needs Linux, root, and the packages containerd, runc and
    containernetworking-plugins. Its pods can reach only each other and this machine.
    """
    kind = type_lookup.find(accelerator)
    if kind.gke_accelerator is None:
        raise click.UsageError(not_available(accelerator, "on GKE", "tpu-vm"))
    # Fail early, before minutes are spent on a build.
    if node and (reason := real_node.unsupported_reason()):
        raise real_node.RealNodeUnsupported(reason)
    if gke_plan:
        emulated_gke.load_plan(gke_plan)
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: leave no half-started cluster
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    plane = cluster.up(_folder(), output.print_status)
    if lws:
        leader_worker_sets.install(plane, output.print_status)
    if gke or gke_plan:
        emulated_gke.start(plane, output.print_status, gke_plan)
    if node:
        shape = NodeShape(
            accelerator=kind.gke_accelerator, topology=kind.topology, chips=kind.chips
        )
        _add_node(plane, shape)
    kubeconfig = str(plane.kubeconfig)
    output.print_result({"kubeconfig": kubeconfig}, kubeconfig)


def _add_node(plane: KubernetesControlPlane, shape: NodeShape) -> None:
    """With the image, a queue and a volume for pods."""
    image = builder.build(progress=output.print_status)
    node = real_node.add(plane, shape, output.print_status)
    node_images.load_image(node, image)
    job_namespace.apply_manifests(plane, node)
    job_namespace.install_queue(plane, node)
    job_namespace.save_image(node, image.reference)
    output.print_status(
        f"jobs wait in the LocalQueue {job_namespace.NAMESPACE}/{job_namespace.QUEUE}"
    )


@local_group.command(
    "env",
    epilog='\b\nExamples:\n  eval "$(tpu cluster local env)" && tpu serve\n'
    '  eval "$(tpu cluster local env)" && tpu provisioner\n',
)
@json_option
def env() -> None:
    """Print variables for a shell. With them, a server runs jobs on the real node (`up --node`),
    and a provisioner uses the emulated GKE (`up --gke`)."""
    plane = cluster.find(_folder())
    variables: dict[str, str] = {}
    with_gke = emulated_gke.is_running(plane.layout)
    node = real_node.find(plane.layout) if with_gke else real_node.get(plane.layout)
    if node is not None:
        variables.update(job_namespace.server_settings(plane, node))
    if with_gke:
        variables.update(emulated_gke.provisioner_settings(plane))
    if "TPUFLEET_SERVER" in variables:
        # The server is not on loopback, so its token is not read from the state folder by default.
        variables["TPUFLEET_TOKEN_FILE"] = str(connection.settings().home / "token")
    if output.printed_json(variables):
        return
    for name, value in variables.items():
        click.echo(f"export {name}={shlex.quote(value)}")


@local_group.command(
    "kubectl",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    epilog="\b\nExamples:\n  tpu cluster local kubectl get jobsets,pods -A\n",
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def kubectl(context: click.Context, args: tuple[str, ...]) -> None:
    """Run the cluster's kubectl with the given arguments."""
    plane = cluster.find(_folder())
    command = [str(plane.build.harness), "kubectl", f"--kubeconfig={plane.kubeconfig}", *args]
    context.exit(subprocess.run(command, check=False).returncode)


@local_group.command(
    "image",
    epilog="\b\nExamples:\n  tpu cluster local image tpufleet.tar --variant tpu\n"
    "  tpu cluster local image server.tar --variant server\n",
)
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--variant",
    type=click.Choice(["agent", "server", "tpu", "trainer"]),
    default="agent",
    show_default=True,
    help="What it holds: agent (JAX for simulated chips), server (no JAX), tpu (with libtpu), "
    "trainer (tpu, and what the examples import).",
)
@json_option
def image(target: Path, variant: str) -> None:
    """Build a container image of this checkout into an archive, without a container engine.

    The archive is an OCI image layout, which `ctr images import` reads. Needs Linux, root and
    debootstrap.
    """
    built = builder.build(
        arguments={"REQUIREMENTS": builder.VARIANTS[variant]}, progress=output.print_status
    )
    with target.open("wb") as archive:
        built.write(archive)
    result = {"image": built.reference, "archive": str(target)}
    output.print_result(result, built.reference)


@local_group.command("down", epilog="\b\nExample:\n  tpu cluster local down\n")
@json_option
def down() -> None:
    """Stop the cluster and delete everything of it."""
    stopped = cluster.down(_folder())
    message = "stopped" if stopped else cluster.not_running(_folder())
    output.print_result({"stopped": stopped}, message)


@local_group.command("status", epilog="\b\nExample:\n  tpu cluster local status\n")
@json_option
def status() -> None:
    """List the processes of the cluster."""
    parts = cluster.status(_folder())
    output.print_table(
        ("PART", "PID", "STATE", "MEMORY"),
        [
            (
                part.name, str(part.pid), "running" if part.alive else "dead",
                f"{part.memory / MEBIBYTE:.0f} MiB",
            )
            for part in parts
        ],
        cluster.not_running(_folder()),
        value=parts,
    )  # fmt: skip


def _folder() -> Path:
    option: Path | None = shared_option("folder")
    return option or connection.settings().home / "cluster"

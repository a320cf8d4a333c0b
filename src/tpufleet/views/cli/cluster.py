"""`tpu cluster local`: a Kubernetes control plane on this machine. And `tpu provisioner`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import click

from tpufleet.model import topology
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option

MEBIBYTE = 2**20


class Local(Protocol):
    """What the top layer can do with a control plane in a folder."""

    def build(self, progress: Callable[[str], None]) -> Path:
        """Build where needed. The folder with all that was built."""
        ...

    def up(self, folder: Path, progress: Callable[[str], None]) -> Path:
        """Build where needed, start, and give the kubeconfig."""
        ...

    def add_leader_worker_sets(self, folder: Path, progress: Callable[[str], None]) -> None: ...

    def check_node(self) -> None:
        """Raise when this machine cannot run a real node."""
        ...

    def add_node(
        self,
        folder: Path,
        progress: Callable[[str], None],
        accelerator: str,
        topology: str,
        chips: int,
    ) -> None: ...

    def settings(self, folder: Path) -> Mapping[str, str]:
        """Variables with which a server runs jobs on the real node."""
        ...

    def kubectl(self, folder: Path, args: Sequence[str]) -> int:
        """Run kubectl with these arguments. Its exit status."""
        ...

    def image(self, target: Path, tpu: bool, progress: Callable[[str], None]) -> str:
        """Build the container image into an archive. Its name."""
        ...

    def down(self, folder: Path) -> bool: ...

    def status(self, folder: Path) -> Sequence[Any]:
        """Its parts: name, pid, alive, memory."""
        ...


def cluster_command(local: Local) -> click.Command:
    folder_option = click.option(
        "--folder",
        type=click.Path(path_type=Path),
        help="Where it keeps everything (default: cluster in the state folder).",
    )

    @click.group("cluster")
    def cluster() -> None:
        """Kubernetes clusters that jobs can run on."""

    @cluster.group(
        "local",
        epilog="\b\nExamples:\n  tpu cluster local up\n  tpu cluster local status\n"
        "  tpu cluster local kubectl get pods -A\n  tpu cluster local down\n",
    )
    def group() -> None:
        """A whole Kubernetes on this machine, with JobSet, Kueue and simulated TPU nodes.

        etcd, API server, scheduler, controllers, JobSet, Kueue and KWOK run as plain processes on
        loopback. The first start builds them with Go, which takes some ten minutes.
        """

    @group.command("build", epilog="\b\nExample:\n  tpu cluster local build\n")
    def build() -> None:
        """Build its programs into a cache, and start nothing. Print where they are.

        Needs Go 1.26 or newer and 6 GiB of disk, and takes some ten minutes; done once, it takes
        none.
        """
        click.echo(str(local.build(output.print_status)))

    @group.command(
        "up",
        epilog="\b\nExamples:\n  tpu cluster local up\n  sudo tpu cluster local up --node\n",
    )
    @folder_option
    @click.option("--node", is_flag=True, help="With a real node, on which pods really run.")
    @click.option(
        "--accelerator",
        default="v5e-16",
        show_default=True,
        metavar="TYPE",
        help="With --node: the slice whose hosts it plays.",
    )
    @click.option("--lws", is_flag=True, help="With LeaderWorkerSet.")
    def up(folder: Path | None, node: bool, accelerator: str, lws: bool) -> None:
        """Start it, and print the path of its kubeconfig.

        A real node needs Linux, root, and the packages containerd, runc and
        containernetworking-plugins. Its pods reach each other and this machine, nothing else.
        """
        found = topology.find(accelerator)
        if found.gke_accelerator is None:
            raise click.UsageError(f"GKE has no {found.name}")
        if node:
            local.check_node()
        kubeconfig = local.up(_folder(folder), output.print_status)
        if lws:
            local.add_leader_worker_sets(_folder(folder), output.print_status)
        if node:
            local.add_node(
                _folder(folder),
                output.print_status,
                found.gke_accelerator,
                found.topology,
                found.chips,
            )
        click.echo(str(kubeconfig))

    @group.command(
        "env",
        epilog='\b\nExamples:\n  eval "$(tpu cluster local env)" && tpu serve\n',
    )
    @folder_option
    def env(folder: Path | None) -> None:
        """Print the variables with which a server runs jobs on the real node, for a shell."""
        # The server is not on loopback, so its token is not taken from the state folder unasked.
        token = {"TPUFLEET_TOKEN_FILE": str(connection.settings().home / "token")}
        for name, value in {**local.settings(_folder(folder)), **token}.items():
            click.echo(f"export {name}={shlex.quote(value)}")

    @group.command(
        "kubectl",
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
        epilog="\b\nExamples:\n  tpu cluster local kubectl get jobsets,pods -A\n",
    )
    @folder_option
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    @click.pass_context
    def kubectl(context: click.Context, folder: Path | None, args: tuple[str, ...]) -> None:
        """Run the cluster's own kubectl; what follows is for it."""
        context.exit(local.kubectl(_folder(folder), args))

    @group.command(
        "image",
        epilog="\b\nExamples:\n  tpu cluster local image tpufleet.tar --tpu\n",
    )
    @click.argument("target", type=click.Path(path_type=Path, dir_okay=False))
    @click.option("--tpu", is_flag=True, help="With the driver of real chips.")
    def image(target: Path, tpu: bool) -> None:
        """Build the container image of this checkout into an archive, without an engine.

        It is an OCI image layout, which `ctr images import` reads. Needs Linux, root and
        debootstrap.
        """
        click.echo(local.image(target, tpu, output.print_status))  # fmt: skip

    @group.command("down")
    @folder_option
    def down(folder: Path | None) -> None:
        """Stop it and take everything of it away."""
        click.echo("stopped" if local.down(_folder(folder)) else "none runs here")

    @group.command("status")
    @folder_option
    @json_option
    def status(folder: Path | None, as_json: bool) -> None:
        """Which of its parts run."""
        parts = local.status(_folder(folder))
        if as_json:
            output.print_json(parts)
            return
        output.print_table(
            ("PART", "PID", "STATE", "MEMORY"),
            [
                (
                    part.name, str(part.pid), "running" if part.alive else "dead",
                    f"{part.memory / MEBIBYTE:.0f} MiB",
                )
                for part in parts
            ],
            "no control plane runs here; `tpu cluster local up` starts one",
        )  # fmt: skip

    return cluster


def _folder(given: Path | None) -> Path:
    return given or connection.settings().home / "cluster"


def provisioner_command(run: Callable[..., int]) -> click.Command:
    @click.command(
        "provisioner",
        epilog="\b\nExamples:\n  tpu provisioner --leader-elect\n  tpu provisioner --dry-run\n"
        "  tpu provisioner --admit :5000 --certificates /etc/tls\n"
        "  tpu provisioner --make-policies us-central1\n",
    )
    @click.option(
        "--metrics-bind-address",
        default="127.0.0.1:8080",
        metavar="HOST:PORT",
        show_default=True,
        help="Where /metrics is served; :8080 for everywhere.",
    )
    @click.option(
        "--health-probe-bind-address",
        default="127.0.0.1:8081",
        metavar="HOST:PORT",
        show_default=True,
        help="Where /healthz and /readyz are served.",
    )
    @click.option("--leader-elect", is_flag=True, help="Only one of several replicas acts.")
    @click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
    @click.option("--kubeconfig", type=click.Path(path_type=Path), help="Default: as kubectl.")
    @click.option(
        "--namespace",
        default="tpu-provisioner-system",
        show_default=True,
        help="Where the lease is kept.",
    )
    @click.option("--gke-endpoint", default="", hidden=True)
    @click.option(
        "--make-policies",
        metavar="REGION",
        help="Make the workload policies that slices of tpu7x need there, and end.",
    )
    @click.option("--compute-endpoint", default="", hidden=True)
    @click.option(
        "--admit", metavar="HOST:PORT", help="Be the admission webhook on this address instead."
    )
    @click.option(
        "--certificates",
        type=click.Path(path_type=Path),
        help="With --admit: the folder of tls.crt and tls.key.",
    )
    @click.pass_context
    def provisioner(context: click.Context, **options: Any) -> None:
        """Make GKE node pools for JobSets whose pods wait for TPUs, and delete them afterwards.

        Its settings are environment variables; docs/provisioner.md lists them.
        """
        if options["admit"] and not options["certificates"]:
            raise click.UsageError("--admit needs --certificates")
        context.exit(run(**options))  # fmt: skip

    return provisioner

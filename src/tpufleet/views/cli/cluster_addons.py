"""`tpu cluster render|install|doctor`: what runs inside the cluster of an environment."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from tpufleet.environment.addons import install as addons
from tpufleet.environment.addons import team_manifests
from tpufleet.environment.cloud_build import pipelines
from tpufleet.environment.config import names
from tpufleet.errors import BadInput
from tpufleet.views.cli import output
from tpufleet.views.cli.cluster_environment import file_option, read_environment
from tpufleet.views.cli.output import json_option

kubeconfig_option = click.option(
    "--kubeconfig", metavar="FILE", help="The cluster (default: as kubectl would)."
)


@click.command(
    short_help="Write manifests and Cloud Build pipelines.",
    epilog="\b\nExample:\n  tpu cluster render --folder deploy\n",
)
@file_option
@click.option(
    "--folder", type=click.Path(path_type=Path), default=Path("deploy"), show_default=True,
    help="Where to write.",
)  # fmt: skip
def render(file: Path, folder: Path) -> None:
    """Write the manifests of teams and queues, and Cloud Build pipelines, to read or to commit."""
    environment = read_environment(file)
    files = {
        **{f"k8s/{name}": text for name, text in team_manifests.files(environment).items()},
        **{f"cloud-build/{name}": text for name, text in pipelines.files(environment).items()},
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        click.echo(str(path))


@click.command(
    short_help="Install add-ons and queues in the cluster.",
    epilog="\b\nExamples:\n  tpu cluster install\n  tpu cluster install --queues-only\n",
)
@file_option
@kubeconfig_option
@click.option("--queues-only", is_flag=True, help="Only namespaces, queues and priorities.")
def install(file: Path, kubeconfig: str | None, queues_only: bool) -> None:
    """Install JobSet, Kueue and cert-manager at the versions of cluster.yaml, then the queues.

    Waits until each is available. Can be repeated.
    """
    environment = read_environment(file)
    kubectl = _kubectl(kubeconfig)
    step = addons.apply_queues if queues_only else addons.install
    step(environment, kubectl, click.echo)


@click.command(
    short_help="Check the add-ons and queues of the cluster.",
    epilog="\b\nExample:\n  tpu cluster doctor\n",
)
@file_option
@kubeconfig_option
@json_option
@click.pass_context
def doctor(context: click.Context, file: Path, kubeconfig: str | None, as_json: bool) -> None:
    """Check add-ons and queues of the cluster against cluster.yaml. Exit status 1 if any fails."""
    environment = read_environment(file)
    found = addons.checks(environment, _kubectl(kubeconfig))
    if as_json:
        output.print_json({"cluster": names.cluster(environment), "checks": found})
    else:
        output.print_table(
            ("CHECK", "STATE", "DETAIL"),
            [
                (check.name, "ok" if check.ok else ("failed", "red"), check.detail)
                for check in found
            ],
            "no checks",
        )
        for check in found:
            if check.next:
                output.print_status(f"  next: {check.name}: {check.next}")
    context.exit(0 if all(check.ok for check in found) else 1)


def _kubectl(kubeconfig: str | None) -> addons.Kubectl:
    if shutil.which("kubectl") is None:
        raise BadInput("kubectl not found\n  next: `gcloud components install kubectl`")
    options = ["--kubeconfig", kubeconfig] if kubeconfig else []
    return addons.Kubectl(command=["kubectl", *options])

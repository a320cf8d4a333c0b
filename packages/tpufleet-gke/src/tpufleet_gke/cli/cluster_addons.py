"""`tpu cluster render|install|doctor`: what runs inside the cluster of an environment."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from tpufleet.errors import BadInput
from tpufleet.views.cli import output
from tpufleet.views.cli.operators.check import report
from tpufleet.views.cli.output import json_option
from tpufleet_gke.cli.cluster_environment import read_environment
from tpufleet_gke.environment.addons import example_jobsets, helm_values, team_manifests
from tpufleet_gke.environment.addons import install as addons
from tpufleet_gke.environment.cloud_build import pipelines
from tpufleet_gke.environment.config import names

kubeconfig_option = click.option(
    "--kubeconfig", metavar="FILE", help="The cluster (default: as kubectl would)."
)


@click.command(epilog="\b\nExample:\n  tpu cluster render --folder rendered\n")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path(pipelines.RENDERED),
    show_default=True,
    help="Where to write.",
)
@json_option
def render(folder: Path) -> None:
    """Write manifests of teams and queues, the Helm chart with values, and pipelines."""
    _, environment = read_environment()
    files = {
        **{f"k8s/{name}": text for name, text in team_manifests.files(environment).items()},
        **_chart(),
        "helm/values.yaml": helm_values.text(environment),
        "settings.env": helm_values.settings_env(environment),
        **{f"cloud-build/{name}": text for name, text in pipelines.files(environment).items()},
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    written = [str(folder / name) for name in files]
    output.print_result({"files": written}, "\n".join(written))


@click.command(epilog="\b\nExample:\n  tpu cluster install --file cluster.yaml\n")
@kubeconfig_option
@click.option("--queues-only", is_flag=True, help="Only namespaces, queues and priorities.")
@json_option
def install(kubeconfig: str | None, queues_only: bool) -> None:
    """Install JobSet, Kueue and cert-manager at the versions of cluster.yaml, then the queues.

    Waits until each is available. Can be repeated.
    """
    _, environment = read_environment()
    kubectl = _kubectl(kubeconfig)
    step = addons.apply_queues if queues_only else addons.install
    done: list[str] = []

    def report(message: str) -> None:
        done.append(message)
        output.print_status(message)

    step(environment, kubectl, report)
    output.print_result({"done": done}, "installed")


@click.command(epilog="\b\nExample:\n  tpu cluster doctor --kubeconfig lab.conf\n")
@kubeconfig_option
@json_option
@click.pass_context
def doctor(context: click.Context, kubeconfig: str | None) -> None:
    """Check add-ons and queues of the cluster against cluster.yaml. Exit status 1 if any fails."""
    _, environment = read_environment()
    found = addons.checks(environment, _kubectl(kubeconfig))
    report(context, found, cluster=names.cluster(environment))


@click.command(
    epilog="\b\nExample:\n  tpu cluster example hello-world --type v5e-16 --image IMAGE:TAG\n",
)
@click.argument("name", type=click.Choice(["hello-world", "maxtext"]))
@click.option("--team", help="Team whose queue is used (default: the first).")
@output.type_option
@click.option("--slices", default=1, show_default=True, help="Number of slices.")
@click.option("--image", required=True, help="Image with MaxText.")
@click.option("--bucket", help="maxtext: bucket of checkpoints (default: the first).")
@click.option("--dataset", help="maxtext: where the dataset is (default: in the same bucket).")
@click.option(
    "--tensorboard",
    metavar="RESOURCE",
    help="maxtext: also a Job that uploads metrics to this Vertex AI TensorBoard.",
)
@click.option("--uploader-image", help="Image of that Job (default: that of --image).")
@click.option("--suffix", default="", help="Appended to the name of the JobSet.")
@json_option
def example(
    name: str, team: str | None, tpu_type: str, slices: int, image: str,
    bucket: str | None, dataset: str | None, tensorboard: str | None, uploader_image: str | None,
    suffix: str,
) -> None:  # fmt: skip
    """Print the JobSet of an example, for `kubectl apply`; the type decides hosts and chips."""
    import yaml

    _, environment = read_environment()
    owner = team or next(iter(environment.teams))
    if name == "hello-world":
        jobset = example_jobsets.hello_world(
            environment, owner, tpu_type, slices=slices, image=image, suffix=suffix
        )
    else:
        short = bucket or next(iter(environment.buckets), "artifacts")
        location = f"gs://{names.bucket(environment, short)}"
        run_name = f"maxtext-{suffix}" if suffix else "maxtext"
        jobset = example_jobsets.maxtext(
            environment, owner, tpu_type, slices=slices, image=image, suffix=suffix,
            run_name=run_name, output=location, dataset=dataset or location,
        )  # fmt: skip
        if tensorboard:
            upload = example_jobsets.tensorboard_upload(
                environment, owner, resource=tensorboard, run_name=run_name, output=location,
                image=uploader_image or image, suffix=suffix,
            )  # fmt: skip
            jobset = {"apiVersion": "v1", "kind": "List", "items": [jobset, upload]}
    output.print_result(jobset, yaml.safe_dump(jobset, sort_keys=False).rstrip())


def _chart() -> dict[str, str]:
    """That of the server, provisioner and webhook."""
    shipped = team_manifests.SHIPPED
    return {
        str(path.relative_to(shipped)): path.read_text()
        for path in sorted((shipped / "helm").rglob("*.yaml"))
    }


def _kubectl(kubeconfig: str | None) -> addons.Kubectl:
    if shutil.which("kubectl") is None:
        raise BadInput("kubectl not found\n  next: `gcloud components install kubectl`")
    options = ["--kubeconfig", kubeconfig] if kubeconfig else []
    return addons.Kubectl(command=["kubectl", *options])

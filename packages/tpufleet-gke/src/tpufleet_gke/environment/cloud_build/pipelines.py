"""Cloud Build pipelines: provision with a plan gate, destroy, images. Builders are pinned. Pure.

They run as the automation service account, so no one needs to impersonate it.
"""

from __future__ import annotations

from typing import Any

import yaml

from tpufleet import __version__
from tpufleet_gke.environment.addons import install
from tpufleet_gke.environment.config import names
from tpufleet_gke.environment.config.sections import Environment
from tpufleet_gke.environment.terraform.stages import StageName
from tpufleet_gke.environment.terraform.versions import OPENTOFU_VERSION

Json = dict[str, Any]

HEADER = "# Generated from cluster.yaml by `tpu cluster render`; edit that file instead.\n"
OPENTOFU = f"ghcr.io/opentofu/opentofu:{OPENTOFU_VERSION}"
CLOUD_SDK = "gcr.io/google.com/cloudsdktool/google-cloud-cli:532.0.0"  # gcloud and kubectl
DOCKER = "gcr.io/cloud-builders/docker:24.0.9"
PLAN = "stage.tfplan"
# The first stage gives the automation account its roles, so a person applies it.
STAGES = (StageName.INFRASTRUCTURE, StageName.CLUSTER_CONFIG)
# Without variables, which Cloud Build would replace.
CHECK_PROTECTION = (
    f"tofu -chdir={StageName.INFRASTRUCTURE} show -json > state.json && "
    "! grep -q '\"deletion_protection\":true' state.json || "
    "{ echo 'write deletion_protection: false in cluster.yaml and apply it first'; exit 1; }"
)
RENDERED = "rendered"  # folder of `tpu cluster render`
KUBECONFIG = "KUBECONFIG=/workspace/.kubeconfig"
# What images are built of, by target of the Containerfile.
IMAGES = {
    "tpufleet": "image-tpu",
    "tpufleet-agent": "image",
    "tpufleet-server": "image-server",
    "tpufleet-trainer": "image-trainer",
}


def files(environment: Environment) -> dict[str, str]:
    return {
        "plan.yaml": _dump(plan(environment)),
        "provision.yaml": _dump(provision(environment)),
        "destroy.yaml": _dump(destroy(environment)),
        "images.yaml": _dump(images(environment)),
    }


def plan(environment: Environment) -> Json:
    """The gate: plans are saved to the bucket, to be read before `provision` applies them."""
    bucket = names.automation_bucket(environment)
    steps = [
        step
        for stage in STAGES
        for step in (_init(stage), _tofu(stage, "plan", "-input=false", f"-out={PLAN}"))
    ]
    saved = [
        _cloud_sdk(f"save-{stage}", *_copy(str(stage), f"gs://{bucket}/plans/$BUILD_ID/{stage}"))
        for stage in STAGES
    ]
    return _pipeline(environment, [*steps, *saved])


def provision(environment: Environment) -> Json:
    """Applies exactly the plans of an earlier build, named by _PLAN_BUILD; then the add-ons."""
    bucket = names.automation_bucket(environment)
    steps: list[Json] = []
    for stage in STAGES:
        source = f"gs://{bucket}/plans/${{_PLAN_BUILD}}/{stage}"
        steps += [
            _cloud_sdk(f"fetch-{stage}", *_copy(source, str(stage))),
            _init(stage),
            _tofu(stage, "apply", "-input=false", PLAN),
        ]
    return {
        **_pipeline(environment, [*steps, *_addon_steps(environment)]),
        # No default: a build without a plan that someone has read is refused.
        "substitutions": {"_PLAN_BUILD": ""},
        "options": {**_options(), "substitutionOption": "MUST_MATCH"},
    }


def destroy(environment: Environment) -> Json:
    """Nothing is deleted while the cluster is protected: Google would refuse to delete it when all
    else is gone."""
    check = {"name": OPENTOFU, "id": "check-deletion-protection", "entrypoint": "sh"}
    steps: list[Json] = [*map(_init, STAGES), {**check, "args": ["-c", CHECK_PROTECTION]}]
    for stage in reversed(STAGES):
        steps += [
            _tofu(stage, "plan", "-destroy", "-input=false", f"-out={PLAN}"),
            _tofu(stage, "apply", "-input=false", PLAN),
        ]
    return _pipeline(environment, steps)


def images(environment: Environment) -> Json:
    path = names.image_path(environment)
    references = [f"{path}/{name}:{__version__}" for name in IMAGES]
    steps = [
        {
            "name": DOCKER,
            "id": f"build-{name}",
            "args": [
                "build", "-f", "deploy/docker/Containerfile",
                "--build-arg", f"REQUIREMENTS={requirements}",
                "-t", f"{path}/{name}:{__version__}", ".",
            ],
        }
        for name, requirements in IMAGES.items()
    ]  # fmt: skip
    return {**_pipeline(environment, steps), "images": references}


def _addon_steps(environment: Environment) -> list[Json]:
    """As `tpu cluster install` does: each add-on, a wait until it is available, the queues."""
    credentials = _cloud_sdk(
        "credentials", "gcloud", "container", "clusters", "get-credentials",
        names.cluster(environment), f"--region={environment.region}",
        f"--project={environment.project}",
    )  # fmt: skip
    steps = [{**credentials, "env": [KUBECONFIG]}]
    apply = ("apply", "--server-side", "--force-conflicts")
    for addon in install.addons(environment):
        deployment = f"deployment/{addon.deployment}"
        steps += [
            _kubectl(f"install-{addon.name.lower()}", *apply, "-f", addon.url),
            _kubectl(
                f"wait-{addon.name.lower()}", "wait", "--for=condition=Available",
                f"--timeout={install.WAIT}", "-n", addon.namespace, deployment,
            ),
        ]  # fmt: skip
    return [*steps, _kubectl("queues", *apply, "-k", f"{RENDERED}/k8s")]


def _kubectl(step: str, *args: str) -> Json:
    return {**_cloud_sdk(step, "kubectl", *args), "env": [KUBECONFIG]}


def _cloud_sdk(step: str, program: str, *args: str) -> Json:
    return {"name": CLOUD_SDK, "id": step, "entrypoint": program, "args": list(args)}


def _copy(source: str, target: str) -> list[str]:
    """The command that copies a plan, and the provider versions that it was made with."""
    files = [f"{source}/{PLAN}", f"{source}/.terraform.lock.hcl"]
    return ["gcloud", "storage", "cp", *files, f"{target}/"]


def _init(stage: StageName) -> Json:
    return _tofu(stage, "init", "-input=false")


def _tofu(stage: StageName, command: str, *args: str) -> Json:
    return {
        "name": OPENTOFU,
        "id": f"{command}-{stage}",
        "args": [f"-chdir={stage}", command, *args],
    }


def _pipeline(environment: Environment, steps: list[Json]) -> Json:
    account = names.account_email(environment, environment.automation.service_account)
    return {
        "steps": steps,
        "serviceAccount": f"projects/{environment.project}/serviceAccounts/{account}",
        "timeout": "7200s",
        "options": _options(),
    }


def _options() -> Json:
    # A service account of one's own requires one of the log destinations.
    return {"logging": "CLOUD_LOGGING_ONLY", "machineType": "E2_HIGHCPU_8"}


def _dump(document: Json) -> str:
    return HEADER + yaml.safe_dump(document, sort_keys=False, width=100)

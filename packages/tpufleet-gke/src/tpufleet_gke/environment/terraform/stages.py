"""The three stages as files. Values are written out, so that a plan reads like cluster.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from tpufleet_gke.environment.config import names
from tpufleet_gke.environment.config.sections import Environment
from tpufleet_gke.environment.terraform import (
    bootstrap,
    cluster_config,
    gke_cluster,
    network,
    node_pools,
    storage,
    versions,
)
from tpufleet_gke.environment.terraform.hcl import (
    BILLING,
    Block,
    Call,
    Expression,
    Nested,
    resource,
    write,
)

HEADER = "Generated from cluster.yaml by `tpu cluster`; edit that file instead."
GITIGNORE = """\
# State, plans and downloads never go into git.
.terraform/
*.tfstate
*.tfstate.*
*.tfplan
.rehearsal/
.terraform-state/
outputs/
"""


class StageName(StrEnum):
    BOOTSTRAP = "0-bootstrap"
    INFRASTRUCTURE = "1-infrastructure"
    CLUSTER_CONFIG = "2-cluster-config"


def stage_blocks(environment: Environment, stage: StageName) -> dict[str, list[Block]]:
    """The resources and outputs of a stage, by file."""
    match stage:
        case StageName.BOOTSTRAP:
            files = bootstrap.files(environment)
        case StageName.INFRASTRUCTURE:
            files = {
                "network.tf": network.resources(environment),
                "cluster.tf": gke_cluster.resources(environment),
                "cpu_pools.tf": node_pools.cpu_pools(environment),
                "gpu_pools.tf": node_pools.gpu_pools(environment),
                "tpu_pools.tf": node_pools.tpu_pools(environment),
                "storage.tf": storage.resources(environment),
                "outputs.tf": gke_cluster.outputs(environment),
            }
        case StageName.CLUSTER_CONFIG:
            files = cluster_config.files(environment)
    kept = {name: blocks for name, blocks in files.items() if blocks}
    return {
        **kept,
        "outputs.tf": [*files["outputs.tf"], _outputs_object(environment, stage, files)],
    }


def stage_files(
    environment: Environment, stage: StageName, state_folder: str = ""
) -> dict[str, str]:
    """State is kept in a folder for rehearsals; by default, in the automation bucket."""
    files = {
        name: write(blocks, HEADER) for name, blocks in stage_blocks(environment, stage).items()
    }
    files["versions.tf"] = write(_versions(environment, stage, state_folder), HEADER)
    return files


def all_files(environment: Environment, state_folder: str = "") -> dict[str, str]:
    """By path below the folder of cluster.yaml."""
    files = {
        f"{stage}/{name}": text
        for stage in StageName
        for name, text in stage_files(environment, stage, state_folder).items()
    }
    return {**files, ".gitignore": GITIGNORE}


def _versions(environment: Environment, stage: StageName, state_folder: str) -> list[Block]:
    google = {
        "source": versions.GOOGLE_PROVIDER,
        "version": versions.GOOGLE_PROVIDER_VERSION,
    }
    required = Block(
        kind="terraform",
        body={
            "required_version": versions.REQUIRED_VERSION,
            "required_providers": Nested({"google": google}),
        },
    )
    labels = {**environment.labels, "tpufleet-environment": environment.name}
    common = {
        "project": environment.project, "region": environment.region, "default_labels": labels,
    }  # fmt: skip
    providers = [Block(kind="provider", labels=("google",), body=common)]
    if environment.budget is not None and stage is not StageName.CLUSTER_CONFIG:
        billing = {
            "alias": BILLING.text.rpartition(".")[2],
            **common,
            "billing_project": environment.project,
            "user_project_override": True,
        }
        providers.append(Block(kind="provider", labels=("google",), body=billing))
    if state_folder:
        kind, place = "local", {"path": f"{state_folder}/{stage}.tfstate"}
    else:
        kind = "gcs"
        prefix = f"{environment.automation.state_prefix}/{stage}"
        place = {"bucket": names.automation_bucket(environment), "prefix": prefix}
    backend = Block(kind="terraform", body={f'backend "{kind}"': Nested(place)})
    blocks = [required, backend, *providers]
    own_bucket = stage is StageName.BOOTSTRAP and environment.automation.create_bucket
    if own_bucket and not state_folder:
        blocks.append(bootstrap.bucket_import(environment))
    return blocks


def _outputs_object(
    environment: Environment, stage: StageName, files: Mapping[str, Sequence[Block]]
) -> Block:
    """The outputs of the stage as JSON, for pipelines and scripts."""
    values = {
        block.labels[0]: block.body["value"] for block in files["outputs.tf"]
        if block.kind == "output"
    }  # fmt: skip
    bucket: object = names.automation_bucket(environment)
    if stage is StageName.BOOTSTRAP and environment.automation.create_bucket:
        bucket = Expression("google_storage_bucket.automation.name")
    return resource(
        "google_storage_bucket_object", "outputs",
        comment="The outputs above as one JSON file, for pipelines and scripts.",
        bucket=bucket, name=f"outputs/{stage}.json", content_type="application/json",
        content=Call("jsonencode", values),
    )  # fmt: skip

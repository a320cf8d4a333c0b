"""JobSets of the two examples, for use without the server: hello world and MaxText. Pure.

What users typed before (hosts, chips per host, ICI parallelism, queue, service account) follows
from the TPU type and from cluster.yaml.
"""

from __future__ import annotations

import re
from typing import Any

from tpufleet.errors import BadInput, invalid, not_available, unknown
from tpufleet.model.tpu import type_lookup
from tpufleet.model.tpu.type_lookup import Accelerator
from tpufleet.providers.gke import keys, kueue, manifests
from tpufleet_gke.environment.addons import compute_classes
from tpufleet_gke.environment.config import names
from tpufleet_gke.environment.config.sections import Environment, Team

Json = dict[str, Any]

JOBSET_API_VERSION = "jobset.x-k8s.io/v1alpha2"
NAME = "tpu-training-job"
PORTS = (8471, 8080)  # of the TPU runtime, and of the MXLA coordinator
# A preemption restarts the JobSet, which then continues from its checkpoint.
MAX_RESTARTS = 100
USER = 65532
RESTRICTED = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
MAX_UPLOAD_SECONDS = 7 * 24 * 3600
TENSORBOARD = re.compile(r"projects/[^/]+/locations/[a-z0-9-]+/tensorboards/[0-9]+")
MAXTEXT_ARGS = (
    "steps=150 per_device_batch_size=6 enable_checkpointing=true checkpoint_period=50 "
    "async_checkpointing=true enable_profiler=false remat_policy=full max_target_length=2048 "
    "log_period=50 global_parameter_scale=8"
)
LIBTPU_INIT_ARGS = " ".join(
    (
        "--xla_tpu_enable_data_parallel_all_reduce_opt=true",
        "--xla_tpu_data_parallel_opt_different_sized_ops=true",
        "--xla_tpu_enable_async_collective_fusion=true",
        "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
        "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
        "--xla_tpu_overlap_compute_collective_tc=true",
        "--xla_enable_async_all_gather=true",
    )
)


def hello_world(
    environment: Environment, team: str, tpu_type: str, *, slices: int, image: str, suffix: str = ""
) -> Json:
    """Sharded matrix products: data parallel between slices, FSDP within."""
    kind = _gke_type(tpu_type)
    command = [
        "python3", "pedagogical_examples/shardings.py",
        f"--dcn_data_parallelism={slices}", f"--ici_fsdp_parallelism={kind.chips}",
        "--batch_size=131072", "--embedding_dimension=2048",
    ]  # fmt: skip
    return _jobset(environment, team, kind, slices, image, command, {}, suffix)


def maxtext(
    environment: Environment, team: str, tpu_type: str, *, slices: int, image: str, run_name: str,
    output: str, dataset: str, arguments: str = MAXTEXT_ARGS, suffix: str = "",
) -> Json:  # fmt: skip
    """MaxText with checkpoints below `output`, from which a restart continues."""
    kind = _gke_type(tpu_type)
    command = [
        "python3", "MaxText/train.py", "MaxText/configs/base.yml", f"run_name={run_name}",
        f"dataset_path={dataset}", f"base_output_directory={output}",
        f"dcn_data_parallelism={slices}", f"ici_fsdp_parallelism={kind.chips}",
        *arguments.split(),
    ]  # fmt: skip
    variables = {"LIBTPU_INIT_ARGS": LIBTPU_INIT_ARGS}
    return _jobset(environment, team, kind, slices, image, command, variables, suffix)


def tensorboard_upload(
    environment: Environment, team: str, *, resource: str, run_name: str, output: str, image: str,
    suffix: str = "",
) -> Json:  # fmt: skip
    """A Job beside the JobSet, on a CPU node, that uploads what MaxText logs to Vertex AI
    TensorBoard. It is in no queue, because the queues are of slices.

    https://cloud.google.com/vertex-ai/docs/experiments/tensorboard-upload-existing-logs
    """
    if not TENSORBOARD.fullmatch(resource):
        listed = "as `gcloud ai tensorboards list` prints it"
        example = "projects/PROJECT/locations/REGION/tensorboards/NUMBER"
        raise invalid(resource, f"a TensorBoard, {listed}", example)
    settings = _team(environment, team)
    container = {
        "name": "tensorboard",
        "image": image,
        "command": [
            "tb-gcp-uploader", f"--tensorboard_resource_name={resource}",
            f"--logdir={output}/{run_name}/tensorboard", f"--experiment_name={run_name}",
        ],
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }  # fmt: skip
    pod = {
        "restartPolicy": "OnFailure",
        "serviceAccountName": settings.service_account,
        "nodeSelector": {"iam.gke.io/gke-metadata-server-enabled": "true"},
        "securityContext": RESTRICTED,
        "containers": [container],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": f"{NAME}-tensorboard" + (f"-{suffix}" if suffix else ""),
            "namespace": names.team_namespace(team, settings),
        },
        # The uploader never ends by itself.
        "spec": {"activeDeadlineSeconds": MAX_UPLOAD_SECONDS, "template": {"spec": pod}},
    }


def _gke_type(tpu_type: str) -> Accelerator:
    kind = type_lookup.find(tpu_type)
    if kind.gke_accelerator is None:
        raise BadInput(not_available(tpu_type, "on GKE", "tpu-vm"))
    return kind


def _team(environment: Environment, team: str) -> Team:
    if team not in environment.teams:
        raise unknown("team", team, environment.teams)
    return environment.teams[team]


def _jobset(
    environment: Environment, team: str, kind: Accelerator, slices: int, image: str,
    command: list[str], variables: dict[str, str], suffix: str,
) -> Json:  # fmt: skip
    settings = _team(environment, team)
    aware = any(
        pool.topology_aware and pool.type == kind.name for pool in environment.tpu_pools.values()
    )
    metadata = {"metadata": {"annotations": kueue.topology_annotations(kind)}} if aware else {}
    compute_class = compute_classes.class_names(environment).get(kind.name)
    selector: Json = {keys.COMPUTE_CLASS: compute_class} if compute_class else {
        "cloud.google.com/gke-tpu-accelerator": kind.gke_accelerator,
        "cloud.google.com/gke-tpu-topology": kind.topology,
    }  # fmt: skip
    return {
        "apiVersion": JOBSET_API_VERSION,
        "kind": "JobSet",
        "metadata": {
            "name": f"{NAME}-{suffix}" if suffix else NAME,
            "namespace": names.team_namespace(team, settings),
            "labels": {keys.QUEUE: settings.queue, keys.PRIORITY: "medium"},
            "annotations": manifests.exclusive_placement(kind),
        },
        "spec": {
            "successPolicy": {
                "operator": "All",
                "targetReplicatedJobs": [keys.REPLICATED_JOB],
            },
            "failurePolicy": {"maxRestarts": MAX_RESTARTS},
            "replicatedJobs": [
                {
                    "name": keys.REPLICATED_JOB,
                    "replicas": slices,
                    "template": {
                        "spec": {
                            "parallelism": kind.hosts,
                            "completions": kind.hosts,
                            "backoffLimit": 0,
                            "template": {
                                **metadata,
                                "spec": _pod(settings.service_account, kind, selector, image,
                                             command, variables)
                            },
                        }
                    },
                }
            ],
        },
    }  # fmt: skip


def _pod(
    account: str, kind: Accelerator, selector: Json, image: str, command: list[str],
    variables: dict[str, str],
) -> Json:  # fmt: skip
    container: Json = {
        "name": "tpu-job",
        "image": image,
        "command": command,
        "ports": [{"containerPort": port} for port in PORTS],
        "resources": {"limits": {keys.TPU: kind.chips_per_host}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if variables:
        container["env"] = [{"name": name, "value": value} for name, value in variables.items()]
    return {
        "restartPolicy": "Never",
        "serviceAccountName": account,
        "nodeSelector": selector,
        "securityContext": RESTRICTED,
        "containers": [container],
    }

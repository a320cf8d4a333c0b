"""JobSets of the two examples, hello world and MaxText, for use without the server: the YAML files
in `examples/`, with names filled in.

What users typed before (hosts, chips per host, ICI parallelism, queue, service account) follows
from the TPU type and from cluster.yaml.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tpufleet.errors import BadInput, invalid, not_available, unknown
from tpufleet.model.tpu import type_lookup
from tpufleet.model.tpu.type_lookup import Accelerator
from tpufleet.providers.gke import keys, kueue, manifests
from tpufleet_gke.environment.addons import compute_classes
from tpufleet_gke.environment.config import names
from tpufleet_gke.environment.config.sections import Environment, Team

Json = dict[str, Any]

FOLDER = Path(__file__).with_name("examples")
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
    TensorBoard. It is in no queue, because the queues are of slices."""
    if not TENSORBOARD.fullmatch(resource):
        listed = "as `gcloud ai tensorboards list` prints it"
        example = "projects/PROJECT/locations/REGION/tensorboards/NUMBER"
        raise invalid(resource, f"a TensorBoard, {listed}", example)
    settings = _team(environment, team)
    job = _template("tensorboard", names.team_namespace(team, settings), suffix)
    pod = job["spec"]["template"]["spec"]
    pod["serviceAccountName"] = settings.service_account
    pod["containers"][0] |= {
        "image": image,
        "command": [
            "tb-gcp-uploader", f"--tensorboard_resource_name={resource}",
            f"--logdir={output}/{run_name}/tensorboard", f"--experiment_name={run_name}",
        ],
    }  # fmt: skip
    return job


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
    compute_class = compute_classes.class_names(environment).get(kind.name)
    jobset = _template("jobset", names.team_namespace(team, settings), suffix)
    jobset["metadata"]["labels"][keys.QUEUE] = settings.queue
    jobset["metadata"]["annotations"] = manifests.exclusive_placement(kind)
    [replicated] = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    replicated["replicas"], job["parallelism"], job["completions"] = slices, kind.hosts, kind.hosts
    if aware:
        job["template"]["metadata"] = {"annotations": kueue.topology_annotations(kind)}
    pod = job["template"]["spec"]
    pod["serviceAccountName"] = settings.service_account
    pod["nodeSelector"] = {keys.COMPUTE_CLASS: compute_class} if compute_class else {
        "cloud.google.com/gke-tpu-accelerator": kind.gke_accelerator,
        "cloud.google.com/gke-tpu-topology": kind.topology,
    }  # fmt: skip
    [container] = pod["containers"]
    limits = {keys.TPU: kind.chips_per_host}
    container |= {"image": image, "command": command, "resources": {"limits": limits}}
    if variables:
        container["env"] = [{"name": name, "value": value} for name, value in variables.items()]
    return jobset


def _template(name: str, namespace: str, suffix: str) -> Json:
    template: Json = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    template["metadata"]["namespace"] = namespace
    template["metadata"]["name"] += f"-{suffix}" if suffix else ""
    return template

"""Example JobSets: as the former overlays rendered, but for documented improvements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.environment.environments import example
from tpufleet.errors import BadInput
from tpufleet.model.tpu import type_lookup
from tpufleet_gke.environment.addons import example_jobsets

IMAGE = "us-docker.pkg.dev/my-project/ml-images/maxtext-runner:1"
JOB = "spec.replicatedJobs[0].template.spec"
POD = f"{JOB}.template.spec"


def former_hello_world() -> dict[str, Any]:
    """The overlay `tpu_hello_world` for v5e 4x4 and two slices, as its base and parameters say."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": "tpu-training-job", "namespace": "research",
            "labels": {"kueue.x-k8s.io/queue-name": "tpu-training-jobs"},
            "annotations": {
                "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["slice"]},
            "failurePolicy": {"maxRestarts": 1},
            "replicatedJobs": [{"name": "slice", "replicas": 2, "template": {"spec": {
                "parallelism": 4, "completions": 4, "backoffLimit": 0,
                "template": {"spec": {
                    "restartPolicy": "Never",
                    "hostNetwork": True,
                    "dnsPolicy": "ClusterFirstWithHostNet",
                    "nodeSelector": {
                        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
                        "cloud.google.com/gke-tpu-topology": "4x4",
                    },
                    "containers": [{
                        "name": "tpu-job", "image": IMAGE,
                        "command": [
                            "python3", "pedagogical_examples/shardings.py",
                            "--dcn_data_parallelism=2", "--ici_fsdp_parallelism=16",
                            "--batch_size=131072", "--embedding_dimension=2048"],
                        "ports": [{"containerPort": 8471}, {"containerPort": 8080}],
                        "resources": {"limits": {"google.com/tpu": 4}},
                        "securityContext": {"privileged": True},
                    }],
                }},
            }}}],
        },
    }  # fmt: skip


# Path → why it differs; docs/gke-environment.md lists the same.
IMPROVEMENTS = {
    "metadata.labels.kueue.x-k8s.io/priority-class": "one of the five priorities is used",
    "spec.failurePolicy.maxRestarts": "a preemption does not end the run",
    f"{POD}.hostNetwork": "pods have their own network",
    f"{POD}.dnsPolicy": "goes with hostNetwork",
    f"{POD}.serviceAccountName": "buckets are reached through Workload Identity",
    f"{POD}.securityContext.runAsNonRoot": "restricted",
    f"{POD}.securityContext.runAsUser": "restricted",
    f"{POD}.securityContext.seccompProfile.type": "restricted",
    f"{POD}.containers[0].securityContext.privileged": "restricted",
    f"{POD}.containers[0].securityContext.allowPrivilegeEscalation": "restricted",
    f"{POD}.containers[0].securityContext.capabilities.drop[0]": "restricted",
}


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        parts = [leaves(item, f"{path}.{key}".strip(".")) for key, item in value.items()]
    elif isinstance(value, list):
        parts = [leaves(item, f"{path}[{index}]") for index, item in enumerate(value)]
    else:
        return {path: value}
    return {key: item for part in parts for key, item in part.items()}


def hello(kind: str = "v5e-16", slices: int = 2) -> dict[str, Any]:
    return example_jobsets.hello_world(example(), "research", kind, slices=slices, image=IMAGE)


def test_hello_world_is_the_former_one_but_for_the_improvements():
    former, ours = leaves(former_hello_world()), leaves(hello())
    different = {
        path for path in {*former, *ours} if former.get(path) != ours.get(path)
    }  # fmt: skip
    assert different == set(IMPROVEMENTS)


@pytest.mark.parametrize("kind", ["v5e-1", "v5e-8", "v5e-16", "v5p-128", "v6e-256", "tpu7x-64"])
def test_c8_hosts_chips_and_parallelism_follow_from_the_type(kind):
    """Was: google.com/tpu: 4 for every type, the rest computed by hand."""
    shape, jobset = type_lookup.find(kind), leaves(hello(kind, 3))
    assert jobset[f"{JOB}.parallelism"] == jobset[f"{JOB}.completions"] == shape.hosts
    assert jobset[f"{POD}.containers[0].resources.limits.google.com/tpu"] == shape.chips_per_host
    command = [value for path, value in jobset.items() if ".command[" in path]
    assert f"--ici_fsdp_parallelism={shape.chips}" in command
    assert "--dcn_data_parallelism=3" in command


def test_c9_pods_are_restricted():
    pod = leaves(hello())
    assert f"{POD}.hostNetwork" not in pod
    assert not [path for path in pod if path.endswith("privileged")]
    assert pod[f"{POD}.serviceAccountName"] == "tpu-worker"


def test_c13_checkpoints_are_on_and_a_preemption_does_not_end_the_run():
    jobset = example_jobsets.maxtext(
        example(), "research", "v5e-16", slices=2, image=IMAGE, run_name="r",
        output="gs://my-project-ml-checkpoints/r", dataset="gs://my-project-ml-datasets",
    )  # fmt: skip
    found = leaves(jobset)
    command = [value for path, value in found.items() if ".command[" in path]
    assert "enable_checkpointing=true" in command
    assert "enable_checkpointing=false" not in command
    assert found["spec.failurePolicy.maxRestarts"] >= 10
    assert {"run_name=r", "dcn_data_parallelism=2", "ici_fsdp_parallelism=16"} <= set(command)


def test_an_unknown_team_or_type_is_an_error():
    with pytest.raises(BadInput, match="'x'; write one of research, serving"):
        example_jobsets.hello_world(example(), "x", "v5e-16", slices=1, image=IMAGE)
    with pytest.raises(BadInput, match="v2-8 is not available on GKE"):
        hello("v2-8")


def former_maxtext() -> dict[str, Any]:
    """The slices of the overlay `maxtext` for v5e 4x4 and two slices."""
    jobset = former_hello_world()
    arguments = (
        "steps=150 per_device_batch_size=6 enable_checkpointing=false enable_profiler=false "
        "remat_policy=full max_target_length=2048 log_period=50 global_parameter_scale=8"
    )
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    container["command"] = [
        "python3", "MaxText/train.py", "MaxText/configs/base.yml", "run_name=r",
        "dataset_path=gs://d", "base_output_directory=gs://b", *arguments.split(),
    ]  # fmt: skip
    container["env"] = [
        {"name": "LIBTPU_INIT_ARGS", "value": example_jobsets.LIBTPU_INIT_ARGS},
    ]
    return jobset


def without_command(jobset: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    plain = leaves(jobset)
    command = {path: value for path, value in plain.items() if ".command[" in path}
    return {path: plain[path] for path in plain.keys() - command.keys()}, set(command.values())


def test_maxtext_is_the_former_one_but_for_the_improvements():
    ours = example_jobsets.maxtext(
        example(), "research", "v5e-16", slices=2, image=IMAGE, run_name="r",
        output="gs://b", dataset="gs://d",
    )  # fmt: skip
    (former, former_command), (plain, command) = map(without_command, (former_maxtext(), ours))
    different = {path for path in {*former, *plain} if former.get(path) != plain.get(path)}
    assert different == set(IMPROVEMENTS)
    assert former_command - command == {"enable_checkpointing=false"}
    assert command - former_command == {
        "enable_checkpointing=true", "async_checkpointing=true", "checkpoint_period=50",
        "dcn_data_parallelism=2", "ici_fsdp_parallelism=16",
    }  # fmt: skip


def test_a_side_job_uploads_to_vertex_tensorboard():
    resource = "projects/p/locations/us-central1/tensorboards/123"
    job = example_jobsets.tensorboard_upload(
        example(), "research", resource=resource, run_name="r", output="gs://b", image=IMAGE
    )
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"] == [
        "tb-gcp-uploader", f"--tensorboard_resource_name={resource}",
        "--logdir=gs://b/r/tensorboard", "--experiment_name=r",
    ]  # fmt: skip
    assert pod["serviceAccountName"] == "tpu-worker", "was: a name that did not exist (C7)"
    assert "labels" not in job["metadata"], "it is in no queue of slices"
    with pytest.raises(BadInput, match="gcloud ai tensorboards list"):
        example_jobsets.tensorboard_upload(
            example(), "research", resource="TPU Training", run_name="r", output="gs://b", image="i"
        )

"""The field `pod` of a job file."""

from __future__ import annotations

import pytest

from tpufleet.errors import BadInput
from tpufleet.model.job.job_file import json_schema, parse_job, to_document
from tpufleet.model.job.pod_settings import PodSettings, Toleration, parse_toleration

JOB = {"command": ["python", "train.py"], "accelerator": "v5e-16"}
POD = {
    "image": "us-docker.pkg.dev/my-project/images/train:v7",
    "cpu": 24,
    "memory": "96Gi",
    "team": "nlp",
    "service_account": "trainer",
    "volumes": {"/data": "my-claim", "/weights": "gs://my-bucket/weights"},
    "labels": {"team": "nlp", "example.com/cost-center": 42},
    "tolerations": ["dedicated=research:NoSchedule"],
}


def test_a_job_file_describes_its_pods_and_is_written_as_it_was_read():
    spec = parse_job({**JOB, "pod": POD})
    assert spec.pod == PodSettings(
        image=POD["image"], cpu="24", memory="96Gi", team="nlp", service_account="trainer",
        volumes=POD["volumes"], labels={"team": "nlp", "example.com/cost-center": "42"},
        tolerations=("dedicated=research:NoSchedule",),
    )  # fmt: skip
    assert parse_job(to_document(spec)) == spec
    assert "pod" not in to_document(parse_job(JOB))
    assert set(json_schema()["properties"]["pod"]["properties"]) == set(POD)


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        (7, "pod: must be a mapping"),
        ({"gpu": 1}, "pod.gpu: unknown field"),
        ({"cpu": "many"}, "pod.cpu: 'many' is not an amount"),
        ({"cpu": True}, "pod.cpu: "),
        ({"memory": "-1Gi"}, "pod.memory: "),
        ({"image": "Not An Image"}, "pod.image: "),
        ({"service_account": "A_B"}, "pod.service_account: "),
        ({"volumes": ["/data"]}, "pod.volumes: must be a mapping"),
        ({"volumes": {"data": "x"}}, "pod.volumes.data: 'data' is not an absolute path"),
        ({"volumes": {"/a/../etc": "x"}}, "not an absolute path"),
        ({"volumes": {"/etc/x": "x"}}, "reserved"),
        ({"volumes": {"/data": "s3://bucket"}}, "is not a PersistentVolumeClaim"),
        ({"volumes": {"/data": "gs://bucket/a,allow_other"}}, "is not a PersistentVolumeClaim"),
        ({"labels": {"app": "x"}}, "pod.labels.app: reserved"),
        ({"labels": {"jobset.sigs.k8s.io/jobset-name": "x"}}, "reserved"),
        ({"labels": {"tpufleet.dev/fleet": "x"}}, "reserved"),
        ({"labels": {"kueue.x-k8s.io/queue-name": "x"}}, "reserved"),
        ({"labels": {"a b": "x"}}, "not a Kubernetes label"),
        ({"tolerations": ["a:Sometimes"]}, "is not a taint"),
    ],
)
def test_what_kubernetes_would_reject_is_rejected_at_submit(pod, message):
    with pytest.raises(BadInput) as error:
        parse_job({**JOB, "pod": pod})
    assert message in str(error.value)


def test_a_job_in_a_pool_cannot_choose_its_pods():
    with pytest.raises(BadInput, match="pod: not with pool"):
        parse_job({**JOB, "pool": "lab", "pod": {"cpu": 8}})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", Toleration(key="a")),
        ("a=b", Toleration(key="a", value="b")),
        ("x.io/a:NoExecute", Toleration(key="x.io/a", effect="NoExecute")),
        ("a=:NoSchedule", Toleration(key="a", value="", effect="NoSchedule")),
    ],
)
def test_tolerations_are_written_like_taints(text, expected):
    assert parse_toleration(text) == expected

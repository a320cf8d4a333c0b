"""Object stores with failing requests: retries neither lose nor duplicate data."""

from __future__ import annotations

import uuid

import pytest

from tests.activations import synthetic
from tests.activations.object_store_servers import failing_proxy
from tests.activations.test_datasets import assert_labels_equal_contents
from tpufleet.errors import BadInput, NotFound, PermissionMissing
from tpufleet_activations import plans
from tpufleet_activations.io import verification
from tpufleet_activations.io.addresses import open_storage


@pytest.fixture(params=["gs", "s3"])
def bucket_at(request):
    """Where the server is, and how a bucket is opened through another address."""
    prefix = f"runs/{uuid.uuid4().hex}"
    if request.param == "gs":
        client = request.getfixturevalue("google")
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage

        from tpufleet_activations.io.gcs import GcsBucket

        def through(address):
            options = {"api_endpoint": address}
            other = storage.Client("test", AnonymousCredentials(), client_options=options)
            return GcsBucket("activations", prefix, other)

        return client._connection.API_BASE_URL, through
    client = request.getfixturevalue("amazon")
    import boto3

    from tpufleet_activations.io.s3 import S3Bucket

    def through(address):
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        other = boto3.client("s3", endpoint_url=address, region_name="us-east-1", **keys)
        return S3Bucket("activations", prefix, other)

    return client.meta.endpoint_url, through


def test_a_missing_bucket_is_named(cloud, tmp_path):
    missing = open_storage(f"{cloud}://no-such-bucket/run1")
    for use in (lambda: plans.write(missing, synthetic.plan()), lambda: plans.load(missing)):
        with pytest.raises(NotFound, match=f"the bucket {cloud}://no-such-bucket does not exist"):
            use()


@pytest.mark.parametrize("after", [False, True], ids=["refused", "answer-lost"])
def test_failed_writes_and_lost_responses_are_retried_without_duplicates(bucket_at, after):
    address, through = bucket_at
    wanted = synthetic.plan(samples=5, unit_samples=3)
    with failing_proxy(address, 3, after=after) as way:
        synthetic.extract(through(way), wanted)
    calm = through(address)
    assert_labels_equal_contents(calm, wanted)
    report = verification.verify(calm)
    assert report.intact and report.leftovers == ()
    # A retried write that finds its own record succeeds: each unit was claimed once.
    assert len(calm.names("units/")) == 2 * wanted.units


def test_a_conditional_write_conflict_is_retried(amazon):
    from botocore.exceptions import ClientError

    from tpufleet_activations.io.s3 import S3Bucket

    class Undecided:
        """S3 answers so while another write of the same name is under way."""

        left = 2

        def __getattr__(self, name):
            return getattr(amazon, name)

        def put_object(self, **arguments):
            self.left -= 1
            if self.left >= 0:
                answer = {"Error": {"Code": "ConditionalRequestConflict"}}
                raise ClientError(answer, "PutObject")
            return amazon.put_object(**arguments)

    bucket = S3Bucket("activations", uuid.uuid4().hex, Undecided())
    assert bucket.create("units/a", b"first")
    assert not bucket.create("units/a", b"second")
    assert bucket.read("units/a") == b"first"


def test_a_missing_bucket_is_reported(cloud):
    nowhere = open_storage(f"{cloud}://no-such-bucket/x")
    for ask in (lambda: nowhere.create("a", b""), lambda: nowhere.read("a")):
        with pytest.raises(NotFound, match="no-such-bucket"):
            ask()


def test_missing_credentials_are_reported(monkeypatch, tmp_path):
    pytest.importorskip("boto3")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with pytest.raises(PermissionMissing, match="AWS_ACCESS_KEY_ID"):
        open_storage("s3://bucket/x").read("a")


def test_a_url_without_a_bucket_is_rejected():
    with pytest.raises(BadInput, match="no bucket name"):
        open_storage("gs:///x")


def test_names_with_the_marks_of_web_addresses_are_different_datasets(cloud):
    folder = f"{cloud}://activations/{uuid.uuid4().hex}"
    for name in ("run", "run#1", "run#2", "run?x=2"):
        dataset = open_storage(f"{folder}/{name}")
        assert dataset.url == f"{folder}/{name}"
        assert dataset.create("plan.json", name.encode()), "another dataset has this name"
    assert open_storage(f"{folder}/run#2").read("plan.json") == b"run#2"
    assert open_storage(f"{folder}/run").names("") == ["plan.json"]


def test_buckets_of_jobs_keep_the_marks_of_web_addresses(google):
    from tpufleet.runtime import gcs

    folder = f"gs://activations/{uuid.uuid4().hex}"
    for name in ("jobs#7", "jobs?8"):
        gcs.Bucket(f"{folder}/{name}").write("a", name.encode())
    assert gcs.Bucket(folder).read("jobs#7/a") == b"jobs#7"
    assert gcs.Bucket(f"{folder}/jobs?8").read("a") == b"jobs?8"

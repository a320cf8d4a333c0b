"""A job is never simulated silently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpufleet.clocks import ManualClock
from tpufleet.errors import BadInput
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.people.users import Role, User
from tpufleet.model.tpu import type_lookup
from tpufleet.service.files.secrets import JobSecrets
from tpufleet.service.files.snapshots import SnapshotFiles
from tpufleet.service.jobs import submission
from tpufleet.service.jobs.commands import CommandContext
from tpufleet.service.transport.auth import Caller
from tpufleet.stores.base import ChangeSet, EventQuery
from tpufleet.stores.memory import MemoryStore


def submit(
    folder: Path,
    default: str,
    local_containers: bool = False,
    tpu_vm_containers: bool = True,
    **fields,
):
    store = MemoryStore()
    pools = {"sim": "local", "real": "tpu-vm"}
    accelerator = type_lookup.find("v5e-4").name
    store.commit(
        ChangeSet(
            pools=[
                Pool(name=name, provider=provider, accelerator=accelerator, largest=1)
                for name, provider in pools.items()
            ]
        )
    )
    storage = submission.JobStorage(
        snapshots=SnapshotFiles(folder / "snapshots"),
        secrets=JobSecrets(store, [b"k" * 32], ManualClock()),
        checkpoints="/checkpoints",
        providers=("local", "tpu-vm"),
        default_provider=default,
        local_containers=local_containers,
        tpu_vm_containers=tpu_vm_containers,
    )
    caller, now = Caller(name="ann", role=Role.MEMBER), ManualClock().now()
    store.put_user(User(name=caller.name, role=caller.role, created_at=now))
    context = CommandContext(store=store, caller=caller, now=now)
    spec = {"command": ["true"], "accelerator": "v5e-4", **fields}
    body = json.dumps({"jobs": [{"id": "job-1", "spec": spec}]}).encode()
    [job] = submission.submit(context, storage, body)
    return job, store.events(EventQuery())[0]


def test_without_a_default_provider_a_job_must_name_one(tmp_path):
    with pytest.raises(BadInput, match="--provider tpu-vm"):
        submit(tmp_path, "")


@pytest.mark.parametrize(
    ("default", "fields", "simulated"),
    [
        ("local", {}, True),
        ("", {"providers": ["local"]}, True),
        ("tpu-vm", {}, False),
        ("", {"providers": ["tpu-vm"]}, False),
        ("tpu-vm", {"pool": "sim"}, True),
        ("local", {"pool": "real"}, False),
    ],
    ids=[
        "by default",
        "by choice",
        "real by default",
        "real by choice",
        "by its pool",
        "real by its pool",
    ],
)
def test_a_simulated_job_says_so(tmp_path, default, fields, simulated):
    job, event = submit(tmp_path, default, **fields)
    assert ("without TPUs" in job.reason) == ("without TPUs" in event.message) == simulated


SIMULATED = [
    ("local", {}),
    ("", {"providers": ["local"]}),
    ("", {"providers": ["tpu-vm", "local"]}),
    ("tpu-vm", {"pool": "sim"}),
]


@pytest.mark.parametrize(("default", "fields"), SIMULATED)
def test_images_need_leave_to_use_docker_on_the_servers_machine(tmp_path, default, fields):
    with pytest.raises(BadInput, match=r"image: .*set `local_containers: true`"):
        submit(tmp_path, default, image="lab/train:7", **fields)
    submit(tmp_path, default, local_containers=True, image="lab/train:7", **fields)


@pytest.mark.parametrize("fields", [{"providers": ["tpu-vm"]}, {"pool": "real"}])
def test_images_on_tpu_vms_need_no_leave_of_the_server(tmp_path, fields):
    submit(tmp_path, "local", image="lab/train:7", **fields)


@pytest.mark.parametrize("fields", [{"providers": ["tpu-vm"]}, {"pool": "real"}, {}])
def test_images_are_refused_before_a_tpu_vm_is_paid_that_would_refuse_them(tmp_path, fields):
    with pytest.raises(BadInput, match=r"image: .*set `containers: true` in `tpu_vm`"):
        submit(tmp_path, "tpu-vm", tpu_vm_containers=False, image="lab/train:7", **fields)
    submit(tmp_path, "tpu-vm", tpu_vm_containers=False, **fields)


def test_an_image_is_not_refused_where_another_provider_may_run_it(tmp_path):
    submit(
        tmp_path, "tpu-vm", local_containers=True, tpu_vm_containers=False,
        image="lab/train:7", providers=["tpu-vm", "local"],
    )  # fmt: skip

"""The environment of a workload."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from tpufleet.agent.settings import AgentSettings
from tpufleet.agent.workload import environment_variables
from tpufleet.errors import BadInput
from tpufleet.model.fleet.agent_protocol import Assignment
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.attempts import AttemptId
from tpufleet.model.job.jobs import JobId

SETTINGS = AgentSettings(
    server="https://fleet.example",
    slice_id=SliceId("s1"),
    host_index=1,
    num_hosts=2,
    token="sesame",
    work_dir=Path("/w"),
    address="10.0.0.2",
    coordinator_port=8476,
    chips=4,
)
ASSIGNMENT = Assignment(
    attempt_id=AttemptId("j.3"),
    job_id=JobId("j"),
    number=3,
    command=("python", "train.py"),
    setup=(),
    env={},
    secrets={},
    snapshot=None,
    checkpoint="gs://bucket/j",
    grace=timedelta(seconds=30),
    worker_id=1,
    hostnames=("10.0.0.1", "10.0.0.2"),
    slice_index=1,
    num_slices=1,
    process_id=3,
    num_processes=4,
    coordinator_address="10.0.0.9:8476",
    megascale_coordinator="10.0.0.9",
    chips=4,
    accelerator="v5litepod-8",
    token="tpj_j.3.mac",
)


def built(base_env=None, platform="", settings=SETTINGS, local=0, **changes):
    return environment_variables.for_workload(
        replace(ASSIGNMENT, **changes),
        replace(settings, platform=platform),
        base_env=base_env or {},
        attempt_folder=Path("/w/j.3"),
        local=local,
    )


def test_the_environment_identifies_the_process_in_its_gang():
    assert built() == {
        "PYTHONUNBUFFERED": "1",
        "TPU_WORKER_ID": "1",
        "TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2",
        "TPUFLEET_COORDINATOR_ADDRESS": "10.0.0.9:8476",
        "JAX_COORDINATOR_ADDRESS": "10.0.0.9:8476",
        "TPUFLEET_PROCESS_ID": "3",
        "TPUFLEET_NUM_PROCESSES": "4",
        "TPUFLEET_JOB_ID": "j",
        "TPUFLEET_ATTEMPT": "3",
        "TPUFLEET_MAX_SLICES": "1",
        "TPUFLEET_ACCELERATOR": "v5litepod-8",
        "TPUFLEET_CHIPS": "4",
        "TPUFLEET_CHECKPOINT_DIR": "gs://bucket/j",
        "TPUFLEET_LOG_DIR": "/w/j.3/logs",
        "TPUFLEET_RUN_DIR": "/w/j.3/run",
        "TPUFLEET_SERVER": "https://fleet.example",
        "TPUFLEET_TOKEN_FILE": "/w/j.3/run/token",
    }


@pytest.mark.parametrize(
    ("changes", "platform", "more"),
    [
        (
            {"num_slices": 2, "max_slices": 4},
            "",
            {
                "TPUFLEET_MAX_SLICES": "4",
                "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.9",
                "MEGASCALE_NUM_SLICES": "2",
                "MEGASCALE_SLICE_ID": "1",
            },
        ),
        (
            {},
            "cpu",
            {
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": "4",
                "OMPI_MCA_orte_hnp_uri": "0.0;tcp://10.0.0.9:8476",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            },
        ),
    ],
    ids=["multislice", "simulated"],
)
def test_multislice_and_simulation_variables_are_set_only_when_they_apply(changes, platform, more):
    assert built(platform=platform, **changes) == built() | more


@pytest.mark.parametrize(
    ("base", "changes", "name", "value"),
    [
        ({"HOME": "/root"}, {}, "HOME", "/root"),
        ({"TPUFLEET_SERVER": "x"}, {}, "TPUFLEET_SERVER", "https://fleet.example"),
        ({"TPUFLEET_TOKEN_FILE": "x"}, {}, "TPUFLEET_TOKEN_FILE", "/w/j.3/run/token"),
        ({"AUTH": "Bearer sesame"}, {}, "AUTH", None),
        ({"A": "host"}, {"env": {"A": "job"}}, "A", "job"),
        ({}, {"env": {"A": "job"}, "secrets": {"A": "secret"}}, "A", "secret"),
        ({}, {"env": {"TPU_WORKER_ID": "7"}}, "TPU_WORKER_ID", "1"),
        ({}, {"env": {"PYTHONUNBUFFERED": ""}}, "PYTHONUNBUFFERED", ""),
    ],
    ids=[
        "the host's own stays", "no server", "no token file", "no token under any name",
        "job over host", "secret over job", "platform over job", "job over default",
    ],
)  # fmt: skip
def test_later_layers_win_and_credentials_are_removed(base, changes, name, value):
    assert built(base, **changes).get(name) == value


@pytest.mark.parametrize(
    ("platform", "path"), [("", "/usr/bin:/venv/bin"), ("cpu", "/venv/bin:/usr/bin")]
)
def test_the_agents_python_is_last_on_a_real_host_and_first_on_a_simulated_one(platform, path):
    env = environment_variables.for_workload(
        ASSIGNMENT,
        replace(SETTINGS, platform=platform),
        base_env={"PATH": "/usr/bin"},
        attempt_folder=Path("/w"),
        agent_bin_dir="/venv/bin",
    )
    assert env["PATH"] == path


def test_the_repr_of_settings_omits_the_token():
    assert "sesame" not in repr(SETTINGS)


HIDING_WAYS = {
    "directly": lambda state, base: state / "token",
    "with two slashes": lambda state, base: f"/{state}/token",
    "through /proc": lambda state, base: f"/proc/self/root{state}/token",
    "through a link": lambda state, base: linked(base / "link", state / "token"),
    "through a linked folder": lambda state, base: linked(base / "link", state) / "token",
    "through dots": lambda state, base: f"{base}/x/../state/token",
}


def linked(link, target):
    link.symlink_to(target)
    return link


def resolved(path, **options):
    return environment_variables.resolve_secrets({"KEY": f"file:{path}"}, "sesame", **options)[
        "KEY"
    ]


@pytest.mark.parametrize("way", HIDING_WAYS.values(), ids=HIDING_WAYS)
def test_a_file_secret_never_shows_what_is_hidden_from_jobs(tmp_path, way):
    state = tmp_path / "state"
    state.mkdir()
    (tmp_path / "x").mkdir()
    (state / "token").write_text("of the admin")
    with pytest.raises(BadInput, match="the job may not read it"):
        resolved(way(state, tmp_path), hidden=[state])


def test_a_file_secret_may_be_a_link_as_in_pods(tmp_path):
    (tmp_path / "data").write_text("value\n")
    assert resolved(linked(tmp_path / "key", tmp_path / "data"), hidden=[tmp_path / "s"]) == "value"


def test_a_file_secret_is_not_the_memory_of_the_agent_nor_a_pipe_nor_too_large(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text("x" * 70_000)
    for path in ("/proc/self/environ", "/dev/zero", tmp_path / "pipe", tmp_path / "large"):
        with pytest.raises(BadInput, match="cannot read"):
            resolved(path)


def test_a_file_secret_must_be_readable_by_the_user_of_the_job(tmp_path):
    secret = tmp_path / "key"
    secret.write_text("value")
    secret.chmod(0o640)
    uid, gid = os.getuid(), os.getgid()
    with pytest.raises(BadInput, match="the job may not read it"):
        resolved(secret, user=(uid + 1, gid + 1))
    if all(folder.stat().st_mode & 0o001 for folder in tmp_path.parents):
        tmp_path.chmod(0o755)
        assert resolved(secret, user=(uid + 1, gid)) == "value"
    secret.chmod(0o644)
    tmp_path.chmod(0o700)
    with pytest.raises(BadInput, match="the job may not read it"):
        resolved(secret, user=(uid + 1, gid + 1))

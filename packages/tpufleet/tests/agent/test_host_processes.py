"""Several processes on one host: what each of them is told, and on which CPUs it runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.agent.test_environment_variables import built
from tpufleet.agent.workload import host_processes
from tpufleet.errors import BadInput
from tpufleet.model.job.job_file import parse_job


def told(local: int, platform: str = "", **changes):
    """On the second of two hosts."""
    return built(platform=platform, local=local, **{
        "accelerator": "tpu7x-16", "processes_per_host": 2, "process_id": 1, "num_processes": 2,
        **changes,
    })  # fmt: skip


def test_processes_are_counted_host_by_host_and_share_the_chips():
    first, second = told(0), told(1)
    assert [each["TPUFLEET_PROCESS_ID"] for each in (first, second)] == ["2", "3"]
    assert {each["TPUFLEET_NUM_PROCESSES"] for each in (first, second)} == {"4"}
    assert {each["TPUFLEET_CHIPS"] for each in (first, second)} == {"2"}
    assert [each["TPUFLEET_LOCAL_PROCESS_ID"] for each in (first, second)] == ["0", "1"]


def test_libtpu_learns_the_chips_and_the_grid_of_processes():
    """2x2x2 on two hosts of 2x2x1 is 2x1x2 processes of 1x2x1."""
    second = told(1)
    assert second["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,2,1"
    assert second["TPU_PROCESS_BOUNDS"] == "2,1,2"
    assert second["TPU_VISIBLE_CHIPS"] == "2,3"
    assert second["CLOUD_TPU_TASK_ID"] == "3"
    assert second["TPU_PROCESS_PORT"] == "8480"
    assert second["TPU_PROCESS_ADDRESSES"] == (
        "10.0.0.1:8479,10.0.0.1:8480,10.0.0.2:8479,10.0.0.2:8480"
    )


@pytest.mark.parametrize(
    ("accelerator", "chips", "count", "shape", "grid"),
    [
        ("tpu7x-8", 4, 4, "1,1,1", "2,2,1"),
        ("v6e-8", 8, 2, "1,4,1", "2,1,1"),
        ("v6e-16", 4, 2, "1,2,1", "4,2,1"),
        ("v5p-64", 4, 2, "1,2,1", "2,2,4"),
    ],
)
def test_the_grid_of_every_shape_has_as_many_places_as_processes(
    accelerator, chips, count, shape, grid
):
    found = told(0, accelerator=accelerator, chips=chips, processes_per_host=count)
    assert (found["TPU_CHIPS_PER_PROCESS_BOUNDS"], found["TPU_PROCESS_BOUNDS"]) == (shape, grid)


def test_simulated_chips_are_divided_too_and_one_process_per_host_is_told_nothing_new():
    simulated = told(1, "cpu")
    assert simulated["JAX_NUM_CPU_DEVICES"] == "2"
    assert simulated["OMPI_COMM_WORLD_LOCAL_RANK"] == "1"
    assert "TPU_VISIBLE_CHIPS" not in simulated
    alone = built()
    assert "TPUFLEET_LOCAL_PROCESS_ID" not in alone and "TPU_PROCESS_BOUNDS" not in alone


def test_each_process_runs_on_the_cpus_of_its_numa_node(tmp_path: Path):
    before = os.sched_getaffinity(0)
    for node, cpus in enumerate((f"{min(before)}", f"{max(before)}")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    with host_processes.near_its_chips(1, 2, tmp_path):
        assert os.sched_getaffinity(0) == {max(before)}
    assert os.sched_getaffinity(0) == before
    with host_processes.near_its_chips(1, 4, tmp_path):
        assert os.sched_getaffinity(0) == before, "two nodes are not for four processes"


@pytest.mark.parametrize(
    ("more", "problem"),
    [({"processes_per_host": 3}, "must divide the 4 chips"),
     ({"processes_per_host": 2, "image": "lab/train:7"}, "not with image")],
)  # fmt: skip
def test_a_number_that_cannot_be_is_refused(more, problem):
    spec = {"accelerator": "tpu7x-16", "command": "python train.py", **more}
    with pytest.raises(BadInput, match=problem):
        parse_job(spec)

"""First days with the former job manager, line by line as its users type them in a terminal."""

from __future__ import annotations

import shlex
from datetime import timedelta

import pytest

from tests.service.harness import ServiceHarness
from tests.views.conftest import cli_for_user
from tests.views.job_scenarios import cancelled, end_job
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.job.jobs import JobState
from tpufleet.stores.base import ChangeSet

ADMIN = """
tpu add-user nora
tpu list-users
tpu set-cur 1 nora
"""
FIRST_DAY = """
tpu -h run
tpu ls nora
tpu get-dir 1 nora
tpu get-settings nora
tpu set-settings monitor_after_run False nora
tpu -a sd config.seed nora
tpu -ta big v5e-64 nora
tpu find v56 -n
tpu find v*
tpu zhan lab nora
tpu rel lab nora
tpu run v5e-16 nora
tpu run big 1 nora lr=0.1 sd=3 tag=sweep rule=pre ssn="with dropout"
tpu run v5e-16 dir=1 tag=third -q user=nora
tpu check nora
tpu check-simp nora col=2
tpu caj -wdtsv
tpu vq nora
tpu add-tag main paper nora
tpu ssn main "diverges at 900" nora
tpu kill main nora
"""
NEXT_DAY = """
tpu check nora -v
tpu resume main tpu=big nora
tpu rerun SWEEP ka=v5e-32 lr=0.2 nora
tpu events --since 1000d
tpu clean nora
tpu -Ml cn
"""


@pytest.fixture
def lab(world: ServiceHarness, work) -> None:
    pool = Pool(name="lab", provider="local", accelerator="v5litepod-16", largest=2)
    world.store.commit(ChangeSet(pools=[pool]))
    world.add_slice("s1", None, pool="lab")
    (work / "main.py").touch()


def type_in(world, tpu, script: str) -> None:
    for line in script.strip().splitlines():
        world.clock.advance(timedelta(seconds=1))
        answer = tpu(*shlex.split(line)[1:], input="y\n")
        assert answer.exit_code == 0, f"$ {line}\n{answer.output}"


def test_the_first_days_of_a_user(world, admin, lab, tmp_path):
    type_in(world, admin, ADMIN)
    world.tokens["nora"] = admin.json("register-web", "--user", "nora")["token"]
    nora = cli_for_user(world, tmp_path, "nora")
    type_in(world, nora, FIRST_DAY)
    rows = nora.json("jobs")["jobs"]
    specs = [nora.json("show", row["id"])["job"]["spec"] for row in rows]
    assert [spec["command"] for spec in specs] == [
        ["python", "main.py"],
        ["python", "main.py", "--config.training.learning_rate=0.1", "--config.seed=3"],
        ["python", "main.py"],
    ]
    assert (specs[1]["accelerator"], specs[1]["rule"]) == ("v5litepod-64", "pre")
    assert world.client("nora").reservations() == ()
    third, sweep, first = (row["id"] for row in rows)
    assert cancelled(world, third) and not cancelled(world, sweep)
    for job in (third, sweep, first):
        end_job(world, job, JobState.FAILED)
    type_in(world, nora, NEXT_DAY.replace("SWEEP", sweep))
    left = nora.json("jobs")["jobs"]
    children = {row["parent"]: row["accelerator"] for row in left if row["parent"]}
    assert children == {third: "v5litepod-64", sweep: "v5litepod-32"}
    assert {row["id"] for row in left if not row["parent"]} == {third, sweep}
    assert [row["id"] for row in nora.json("jobs", "is:archived")["jobs"]] == [first]

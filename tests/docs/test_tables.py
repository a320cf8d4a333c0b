"""Tables in the documentation match the code."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import click
import pytest
from msgspec import structs

from tests.docs import generated_tables, markdown
from tests.test_architecture import MAY_IMPORT
from tpufleet import config
from tpufleet.agent.settings import AgentSettings
from tpufleet.agent.workload import environment_variables
from tpufleet.model.fleet.agent_protocol import Assignment
from tpufleet.model.fleet.slices import SliceId, SliceState
from tpufleet.model.job.attempts import AttemptId
from tpufleet.model.job.jobs import JobId, JobState, Retries
from tpufleet.model.people.users import Role
from tpufleet.providers.base import Fault
from tpufleet_activations.cli.deploy import deploy


def column(page: Path, heading: str, index: int = 0) -> list[str]:
    """The cells of a column of the first table below a heading, without backticks."""
    _, heading_line, after = page.read_text().partition(f"\n## {heading}\n")
    assert heading_line, f"{page.name} has no heading {heading}"
    lines = after.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("|---"))
    rows = lines[start + 1 :]
    end = next((at for at, line in enumerate(rows) if not line.startswith("|")), len(rows))
    return [markdown.cells(row)[index].strip("`") for row in rows[:end]]


@pytest.mark.parametrize("name", generated_tables.EXACT)
def test_a_generated_table_is_up_to_date(name):
    page, render = generated_tables.EXACT[name]
    assert markdown.table(page, name) == render(), "run `python -m tests.docs.generated_tables`"


def test_the_documented_layers_are_the_enforced_ones():
    rows = [
        markdown.cells(row)
        for row in markdown.table(markdown.DOCS / "architecture.md", "layers")[2:]
    ]
    documented = {name: set(below.split(", ")) - {"–"} for name, below, _ in rows}
    assert documented == MAY_IMPORT


def test_every_environment_variable_of_a_workload_is_documented():
    rows = markdown.table(markdown.DOCS / "workloads.md", "environment")[2:]
    documented = {markdown.cells(row)[0].strip("`") for row in rows}
    assert documented == set(_multislice_environment())


def _multislice_environment() -> dict[str, str]:
    settings = AgentSettings(
        server="http://127.0.0.1:1", slice_id=SliceId("a"), host_index=0, num_hosts=1,
        token="secret", work_dir=Path("/host"), address="127.0.0.1", coordinator_port=1, chips=4,
        platform="cpu", ca_certificates="of a private CA",
    )  # fmt: skip
    assignment = Assignment(
        attempt_id=AttemptId("j.0"), job_id=JobId("j"), number=0, command=("true",), setup=(),
        env={}, secrets={}, snapshot=None, checkpoint="/c", grace=timedelta(seconds=1),
        worker_id=0, hostnames=("127.0.0.1",), slice_index=0, num_slices=2, process_id=0,
        num_processes=2, coordinator_address="127.0.0.1:1", megascale_coordinator="127.0.0.1",
        chips=4, accelerator="v5litepod-4", token="of the attempt",
        processes_per_host=2,
    )  # fmt: skip
    return environment_variables.for_workload(
        assignment, settings, base_env={}, attempt_folder=Path("/host/j.0")
    )


def test_every_setting_is_documented_with_its_variable():
    rows = [
        markdown.cells(row)
        for row in markdown.table(markdown.DOCS / "server-reference.md", "settings")[2:]
    ]
    assert [row[0].strip("`") for row in rows] == list(config.KEYS)
    assert [row[1].strip("`") for row in rows] == [f"TPUFLEET_{k.upper()}" for k in config.KEYS]


def test_every_retry_limit_is_documented_with_its_default():
    page, defaults = markdown.DOCS / "job-file.md", Retries()
    documented = dict(zip(column(page, "Retries"), column(page, "Retries", 2), strict=True))
    assert documented == {name: str(value) for name, value in structs.asdict(defaults).items()}


def test_every_option_of_a_fleet_of_workers_is_documented():
    cells = " ".join(column(markdown.DOCS / "extraction.md", "A fleet"))
    options = {
        name for each in deploy.params if isinstance(each, click.Option) for name in each.opts
    }
    assert set(re.findall(r"--[a-z-]+", cells)) == options


@pytest.mark.parametrize(
    ("page", "heading", "members"),
    [
        ("docs/glossary.md", "States of a job", JobState),
        ("docs/glossary.md", "States of a slice", SliceState),
        ("docs/simulated-slices.md", "Faults on command", Fault),
        ("docs/server.md", "People", Role),
    ],
    ids=["states of a job", "states of a slice", "faults", "roles"],
)
def test_every_member_of_an_enumeration_is_documented(page, heading, members):
    assert column(markdown.ROOT / page, heading) == [member.value for member in members]

"""Tables in the pages say what the code says."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import pytest

from tests.docs import generated_tables, markdown
from tests.test_architecture import MAY_IMPORT
from tpufleet import config
from tpufleet.agent.settings import AgentSettings
from tpufleet.agent.workload import environment
from tpufleet.model.agent_protocol import Assignment
from tpufleet.model.attempts import AttemptId
from tpufleet.model.jobs import JobId, JobState, Retries
from tpufleet.model.slices import SliceId, SliceState
from tpufleet.model.users import Role
from tpufleet.providers.base import Fault
from tpufleet.views.cli.registry import root


def column(page: Path, heading: str, index: int = 0) -> list[str]:
    """The cells of the first table below a heading, without code marks."""
    _, found, after = page.read_text().partition(f"\n## {heading}\n")
    assert found, f"{page.name} has no heading {heading}"
    lines = after.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("|---"))
    rows = lines[start + 1 :]
    end = next((at for at, line in enumerate(rows) if not line.startswith("|")), len(rows))
    return [markdown.cells(row)[index].strip("`") for row in rows[:end]]


@pytest.mark.parametrize("name", generated_tables.EXACT)
def test_a_table_made_from_the_code_is_up_to_date(name):
    page, made = generated_tables.EXACT[name]
    assert markdown.table(page, name) == made(), "run `python -m tests.docs.generated_tables`"


def test_the_layers_in_the_page_are_those_that_the_test_of_layers_enforces():
    rows = [
        markdown.cells(row)
        for row in markdown.table(markdown.DOCS / "architecture.md", "layers")[2:]
    ]
    told = {name: set(below.split(", ")) - {"–"} for name, below, _ in rows}
    assert told == MAY_IMPORT


def test_every_variable_that_a_workload_gets_is_explained():
    rows = markdown.table(markdown.DOCS / "workloads.md", "environment")[2:]
    told = {markdown.cells(row)[0].strip("`") for row in rows}
    assert told == set(_multislice_environment())


def _multislice_environment() -> dict[str, str]:
    settings = AgentSettings(
        server="http://127.0.0.1:1", slice_id=SliceId("a"), host_index=0, num_hosts=1, token="secret",
        work_dir=Path("/host"), address="127.0.0.1", coordinator_port=1, chips=4, platform="cpu",
    )  # fmt: skip
    assignment = Assignment(
        attempt_id=AttemptId("j.0"), job_id=JobId("j"), number=0, command=("true",), setup=(),
        env={}, secrets={}, snapshot=None, checkpoint="/c", grace=timedelta(seconds=1),
        worker_id=0, hostnames=("127.0.0.1",), slice_index=0, num_slices=2, process_id=0,
        num_processes=2, coordinator_address="127.0.0.1:1", megascale_coordinator="127.0.0.1",
        chips=4, accelerator="v5litepod-4",
    )  # fmt: skip
    return environment.for_workload(
        assignment, settings, base_env={}, attempt_folder=Path("/host/j.0")
    )


def test_every_setting_is_explained_under_the_name_of_its_variable():
    rows = [
        markdown.cells(row) for row in markdown.table(markdown.DOCS / "server.md", "settings")[2:]
    ]
    assert [row[0].strip("`") for row in rows] == list(config.KEYS)
    assert [row[1].strip("`") for row in rows] == [f"TPUFLEET_{k.upper()}" for k in config.KEYS]


def test_every_retry_budget_is_listed_with_its_default():
    page, defaults = markdown.DOCS / "job-file.md", Retries()
    told = dict(zip(column(page, "Retries"), column(page, "Retries", 2), strict=True))
    assert told == {part.name: str(getattr(defaults, part.name)) for part in fields(Retries)}


@pytest.mark.parametrize(
    ("page", "heading", "words"),
    [
        ("docs/glossary.md", "States of a job", JobState),
        ("docs/glossary.md", "States of a slice", SliceState),
        ("docs/simulated-slices.md", "Faults on command", Fault),
        ("docs/server.md", "People", Role),
    ],
    ids=["states of a job", "states of a slice", "faults", "roles"],
)
def test_every_word_of_a_list_is_explained(page, heading, words):
    assert column(markdown.ROOT / page, heading) == [word.value for word in words]


def test_the_readme_lists_every_verb():
    told = [cell.split()[1].strip("`") for cell in column(markdown.ROOT / "README.md",
                                                          "Commands")]  # fmt: skip
    assert sorted(told) == sorted(root().lazy_commands)

"""The documentation is consistent: links resolve, job files parse, Python compiles."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs import markdown
from tpufleet import config
from tpufleet.model.job import job_file
from tpufleet.providers.local import fault_plan
from tpufleet.views.cli.jobs import job_files
from tpufleet_gke.environment.config import parse as cluster_file

# Examples of other kinds, such as JobSets, say what they are.
JOB_FILES = sorted(
    file
    for file in markdown.EXAMPLES.rglob("*.yaml")
    if file.name != "cluster.yaml" and "\napiVersion:" not in f"\n{file.read_text()}"
)


def _as_config(plain: dict[str, Any], folder: Path) -> None:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(plain))
    config.load({"TPUFLEET_CONFIG": str(file)}, folder)


def _as_storm(plain: dict[str, Any], folder: Path) -> None:
    plans = pytest.importorskip("tpufleet_testbed.cloud_tpu.fault_plan")
    file = folder / "storm.yaml"
    file.write_text(yaml.safe_dump(plain))
    plans.load(file)


def _as_gke_plan(plain: dict[str, Any], _: Path) -> None:
    plans = pytest.importorskip("tpufleet_testbed.gke.fault_plan")
    assert plans.parse(yaml.safe_dump(plain)).stock


# The first line of a block of YAML is a comment that names the file.
READERS: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "# job.yaml": lambda plain, _: job_file.parse_job(plain),
    "# faults.yaml": lambda plain, _: fault_plan.parse(plain),
    "# config.yaml": _as_config,
    "# storm.yaml": _as_storm,
    "# gke.yaml": _as_gke_plan,
    "# cluster.yaml": lambda plain, _: cluster_file.parse(plain),
}


@pytest.mark.parametrize("block", markdown.blocks("yaml"), ids=lambda block: block.where)
def test_yaml_in_a_page_is_valid(block, tmp_path):
    name = block.text.partition("\n")[0]
    assert name in READERS, f"{block.where}: begin with one of {', '.join(READERS)}"
    READERS[name](yaml.safe_load(block.text), tmp_path)


@pytest.mark.parametrize("file", JOB_FILES, ids=lambda file: str(file.relative_to(markdown.ROOT)))
def test_an_example_job_file_parses_and_its_folder_exists(file):
    for plain, folder in job_files.read(str(file)):
        spec = job_file.parse_job(plain)
        assert (folder / spec.workdir).is_dir()
        scripts = [part for part in spec.command if part.endswith(".py")]
        # The programs of an image are not here.
        assert (scripts or spec.pod.image) and all(
            (folder / spec.workdir / script).is_file() for script in scripts
        )


@pytest.mark.parametrize("block", markdown.blocks("python"), ids=lambda block: block.where)
def test_python_in_a_page_compiles(block):
    compile(block.text, block.where, "exec")


@pytest.mark.parametrize(
    "page", markdown.pages(), ids=lambda page: str(page.relative_to(markdown.ROOT))
)
def test_every_link_resolves(page):
    broken = []
    for link in markdown.links(page):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = Path(os.path.normpath(page.parent / path)) if path else page
        if not target.exists() or (anchor and anchor not in markdown.anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_reachable_from_the_readme():
    reached, todo = set(), [markdown.ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = (link.partition("#")[0] for link in markdown.links(page) if "://" not in link)
        todo += [Path(os.path.normpath(page.parent / link)) for link in links if link]
    linked = {page for page in markdown.pages() if page.parent != markdown.MAY_BE_DELETED}
    assert linked <= reached


def test_the_overview_lists_every_page():
    overview = (markdown.DOCS / "index.md").read_text()
    pages = {page.name for page in markdown.DOCS.glob("*.md")} - {"index.md"}
    assert {name for name in pages if f"]({name})" not in overview} == set()


def test_the_readme_fits_two_screens_and_opens_with_the_demo_and_the_tests():
    readme = markdown.ROOT / "README.md"
    text = readme.read_text()
    assert len(text.splitlines()) <= 80 and "pip install" not in text
    assert text.partition("## Documentation")[2].count("](") == 5 + 1  # and the licence
    first = next(block.text for block in markdown.blocks("sh") if block.page == readme)
    assert [line.split(" #")[0].strip() for line in first.splitlines()] == ["./tpu demo", "./test"]


@pytest.mark.parametrize(
    "page", markdown.pages(), ids=lambda page: str(page.relative_to(markdown.ROOT))
)
def test_no_paragraph_is_longer_than_120_words(page):
    long = [text[:60] for text in markdown.paragraphs(page) if len(text.split()) > 120]
    assert long == []


def test_decisions_are_numbered_without_holes_and_listed():
    folder = markdown.DOCS / "decisions"
    pages = sorted(path.name for path in folder.glob("0*.md"))
    assert [int(name[:4]) for name in pages] == list(range(1, len(pages) + 1))
    index = (folder / "README.md").read_text()
    assert [name for name in pages if f"({name})" not in index] == []
    for name in pages:
        title = (folder / name).read_text().splitlines()[0]
        assert f"[{title.removeprefix('# ')}]({name})" in index


def test_pages_that_create_a_bucket_say_that_deleted_objects_stay_billed():
    """cloud.google.com/storage/docs/soft-delete: for 7 days, also what is overwritten."""
    creating = {
        path for path in markdown.pages() if "gcloud storage buckets create" in path.read_text()
    }
    assert {path.name for path in creating} >= {"kubernetes.md", "first-job-on-google-cloud.md"}
    for path in creating:
        assert "--clear-soft-delete" in path.read_text(), path.name

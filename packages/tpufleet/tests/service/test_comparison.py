"""Comparisons of code stay small, whatever the snapshots contain."""

from __future__ import annotations

import gzip
import re

import pytest

from tests.service.harness import ServiceHarness
from tests.service.test_files import MALFORMED, packed
from tpufleet.model.api_types import FileDifference, NewJob
from tpufleet.model.job.jobs import JobId
from tpufleet.service.jobs import comparison

SPEC = {"name": "train", "command": ["true"], "accelerator": "v5litepod-16"}


def compare(service: ServiceHarness, folder, *versions: dict[str, str]) -> list:
    client = service.client("mel")
    for number, files in enumerate(versions):
        version = folder / f"version-{number}"
        version.mkdir()
        for path, text in files.items():
            (version / path).write_text(text)
        digest, archive = packed(version)
        with service.http(service.tokens["mel"]) as http:
            assert http.put(f"/snapshots/{digest}", content=archive).is_success
        client.submit([NewJob(id=JobId(f"job-{number}"), spec=SPEC, snapshot=digest)])
    names = [f"job-{number}" for number in range(len(versions))]
    return list(client.compare(names).code)


def lines(*numbers: int) -> str:
    return "".join(f"{number}\n" for number in numbers)


def shuffled(count: int, step: int) -> str:
    """Few different lines, each too rare for `difflib` to leave it out."""
    return lines(*(number * step % 100 for number in range(count)))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(lines(1), "x" * (comparison.MAX_FILE_BYTES + 1), id="large"),
        pytest.param(lines(1), lines(*range(comparison.MAX_FILE_LINES + 1)), id="many lines"),
        pytest.param(shuffled(3999, 37), shuffled(3999, 73), id="many equal lines"),
        pytest.param("", "a" * comparison.MAX_FILE_DIFF_CHARACTERS, id="long difference"),
    ],
)
def test_a_file_that_takes_much_work_is_only_reported_as_different(
    service, tmp_path, before, after
):
    (code,) = compare(service, tmp_path, {"a": before, "b": lines(1)}, {"a": after, "b": lines(2)})
    assert code.files[0] == FileDifference(path="a", change="changed", diff="")
    assert "+2" in code.files[1].diff


def test_large_files_that_differ_at_their_end_differ(service, tmp_path):
    start = "x" * (comparison.MAX_FILE_BYTES + 10)
    (code,) = compare(service, tmp_path, {"a": start + "1"}, {"a": start + "2"})
    assert not code.same


def test_the_whole_output_is_limited(service, tmp_path):
    versions = [
        {f"{number}.py": f"{version} {'y' * 40_000}" for number in range(6)} for version in range(4)
    ]
    codes = compare(service, tmp_path, *versions)
    shown = [file.diff for code in codes for file in code.files]
    assert len(shown) == 18 and all(shown[:4]) and not shown[-1]
    assert sum(map(len, shown)) <= comparison.MAX_DIFF_CHARACTERS


def test_only_some_files_are_listed(service, tmp_path):
    many = {f"{number}.py": "" for number in range(comparison.MAX_LISTED_FILES + 5)}
    (code,) = compare(service, tmp_path, {"a": ""}, many)
    assert len(code.files) == comparison.MAX_LISTED_FILES
    assert code.message == "6 more files differ"
    assert sum(bool(file.diff) for file in code.files) <= comparison.MAX_DIFFED_FILES


def test_only_one_comparison_runs_at_a_time(service, tmp_path):
    compare(service, tmp_path, {"a": "1"}, {"a": "2"})
    with comparison._running, service.http(service.tokens["mel"]) as http:
        busy = http.get("/compare", params={"jobs": "job-0,job-1"})
        assert busy.status_code == 429 and "retry" in busy.text
        assert int(busy.headers["Retry-After"]) > 0
    with service.http(service.tokens["mel"]) as http:
        assert http.get("/compare", params={"jobs": "job-0,job-1"}).is_success


def test_a_viewer_compares_jobs_of_others(service, tmp_path):
    compare(service, tmp_path, {"a": lines(1)}, {"a": lines(2)})
    (code,) = service.client("vic").compare(["job-0", "job-1"]).code
    assert "+2" in code.files[0].diff


HOSTILE = ("negative PAX size of a folder", "sparse 0.1", "end in a file", "end in a header")


@pytest.mark.parametrize("name", HOSTILE)
def test_an_archive_that_was_damaged_on_disk_is_not_expanded(service, tmp_path, name):
    compare(service, tmp_path, {"a": "1"}, {"a": "2"})
    content, message = MALFORMED[name]
    for stored in (service.folder / "snapshots").iterdir():
        stored.write_bytes(gzip.compress(content))
    (code,) = service.client("mel").compare(["job-0", "job-1"]).code
    assert re.search(message, code.message)

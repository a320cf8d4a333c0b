"""Verbs that hid jobs."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("spelling", ["clean", "clear", "clear-all"])
def test_the_former_names_of_archive_delete_nothing(world, tpu, spelling):
    world.submit("job-1")
    world.end_job("job-1")
    kept = world.folder / "checkpoints" / "job-1" / "7"
    kept.mkdir(parents=True)
    tpu.ok(spelling, "--yes")
    assert kept.is_dir() and "job-1" in tpu.ok("jobs", "--archived")

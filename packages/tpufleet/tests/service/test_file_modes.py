"""Who can write to the files of a server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.harness import ServiceHarness
from tpufleet.client import snapshots
from tpufleet.compose import server_files
from tpufleet.stores.memory import MemoryStore


@pytest.fixture(params=[0, 0o002, 0o077], ids=["none", "002", "077"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_only_the_server_writes_to_the_code_logs_and_secrets_of_jobs(umask: int, tmp_path: Path):
    """In a folder that a group shares, with any umask."""
    state, code = tmp_path / "state", tmp_path / "code"
    state.mkdir()
    state.chmod(0o2777)
    code.mkdir()
    (code / "train.py").write_text("print(1)\n")
    server_files.forbid_writes_of_others()
    world = ServiceHarness(MemoryStore(), state)
    world.start()
    try:
        with world.client("mel") as client:
            snapshots.upload(client, snapshots.scan(code))
        world.submit("job-1")
        world.add_slice("slice-1", "job-1")
        world.add_attempt("job-1", 0, "slice-1")
        world.send_log("job-1.0", "slice-1/0", 0, b"hello\n").raise_for_status()
    finally:
        world.close()
    modes = {str(path.relative_to(state)): path.lstat().st_mode for path in state.rglob("*")}
    assert {path.partition("/")[0] for path in modes} == {"logs", "snapshots"}
    assert not [path for path, mode in modes.items() if mode & 0o022]
    unreadable = 0o077 if umask == 0o077 else 0
    assert not [path for path, mode in modes.items() if mode & unreadable], "it may be stricter"


@pytest.mark.parametrize(
    ("mode", "made"),
    [(0o755, 0o700), (0o2770, 0o700), (0o700, 0o700), (0o1777, 0o1777)],
    ids=["others read", "group", "private", "as /tmp"],
)
def test_a_state_folder_that_exists_is_made_private(tmp_path, mode, made):
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(mode)
    server_files.make_private(state)
    assert state.stat().st_mode & 0o1777 == made

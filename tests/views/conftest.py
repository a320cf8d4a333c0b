from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.world import World
from tests.views.programs import Tpu
from tpufleet.stores.memory import MemoryStore


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    folder = tmp_path / "server"
    folder.mkdir()
    world = World(MemoryStore(), folder)
    world.start()
    yield world
    world.close()


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a program in it."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text("print('hello')\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def alone(tmp_path: Path) -> Tpu:
    """Somebody with no server and no settings."""
    return Tpu(HOME=str(tmp_path), TPUFLEET_HOME=str(tmp_path / "state"))


def person(world: World, folder: Path, name: str) -> Tpu:
    file = folder / f"token-{name}"
    file.write_text(world.tokens[name])
    file.chmod(0o600)
    return Tpu(
        HOME=str(folder),
        TPUFLEET_HOME=str(folder / "state"),
        TPUFLEET_SERVER=world.url,
        TPUFLEET_TOKEN_FILE=str(file),
    )


@pytest.fixture
def tpu(world: World, work: Path, tmp_path: Path) -> Tpu:
    """mel, a member."""
    return person(world, tmp_path, "mel")


@pytest.fixture
def admin(world: World, work: Path, tmp_path: Path) -> Tpu:
    return person(world, tmp_path, "ada")

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.contract.fake_store import FakeStore
from tests.service.harness import ServiceHarness
from tests.views.cli_runner import Tpu
from tpufleet.model.people.notifications import NotificationRules

if TYPE_CHECKING:
    from tests.views.emulated_cloud import Cloud


@pytest.fixture
def notifications() -> NotificationRules:
    return NotificationRules()


@pytest.fixture
def world(tmp_path: Path, notifications: NotificationRules) -> Iterator[ServiceHarness]:
    folder = tmp_path / "server"
    folder.mkdir()
    world = ServiceHarness(FakeStore(), folder, notifications)
    world.start()
    yield world
    world.close_soon()


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
    """A user with no server and no settings."""
    return Tpu(HOME=str(tmp_path), TPUFLEET_HOME=str(tmp_path / "state"))


def cli_for_user(world: ServiceHarness, folder: Path, name: str) -> Tpu:
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
def tpu(world: ServiceHarness, work: Path, tmp_path: Path) -> Tpu:
    """The user mel, a member."""
    return cli_for_user(world, tmp_path, "mel")


@pytest.fixture
def admin(world: ServiceHarness, work: Path, tmp_path: Path) -> Tpu:
    return cli_for_user(world, tmp_path, "ada")


@pytest.fixture
def clouds(tmp_path: Path) -> Iterator[Callable[..., Cloud]]:
    """Creates emulated clouds, each with the command line of a user."""
    from tests.views.emulated_cloud import Cloud  # needs Google's client

    created: list[Cloud] = []

    def make(**settings: Any) -> Cloud:
        created.append(Cloud(tmp_path, **settings))
        return created[-1]

    yield make
    for cloud in created:
        cloud.emulator.close()


@pytest.fixture
def cloud(clouds: Callable[..., Cloud]) -> Cloud:
    return clouds()

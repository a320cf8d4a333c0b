"""Servers that start for the first time together agree on what all servers of a store share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tpufleet.compose.providers import fleet_id
from tpufleet.compose.server_files import server_secret
from tpufleet.config import Config
from tpufleet.errors import Conflict
from tpufleet.stores.memory import MemoryStore


class OvertakenStore(MemoryStore):
    """Another server starts right after this one has found that something is not stored."""

    def __init__(self, other: Callable[[OvertakenStore], None]) -> None:
        super().__init__()
        self._other: Callable[[OvertakenStore], None] | None = other

    def metadata(self, name: str) -> str | None:
        value, other = super().metadata(name), self._other
        if value is None and other is not None:
            self._other = None
            other(self)
        return value


def test_they_have_one_fleet_label():
    """With another label, the leader's slices would be those of a stranger after a failover."""
    labels: list[str] = []
    store = OvertakenStore(lambda store: labels.append(fleet_id(store)))
    assert [fleet_id(store)] == labels


def test_one_with_another_secret_is_refused(tmp_path):
    store = OvertakenStore(lambda store: server_secret(settings(tmp_path / "one"), store) and None)
    with pytest.raises(Conflict, match="differs from the secret"):
        server_secret(settings(tmp_path / "two"), store)


def settings(folder: Path) -> Config:
    folder.mkdir()
    return Config(home=folder, config_file=folder / "config.yaml")

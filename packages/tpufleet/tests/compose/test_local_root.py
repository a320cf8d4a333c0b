"""The simulated slices of a store are in one folder, whatever server leads."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from tests import postgres
from tests.views.cli_runner import Tpu
from tpufleet.compose import local_root, server_files
from tpufleet.compose.providers import fleet_id
from tpufleet.config import Config
from tpufleet.errors import Conflict
from tpufleet.model.fleet.cloud_slices import CloudState
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.providers.base import Order
from tpufleet.providers.local.provider import LocalProvider
from tpufleet.stores.memory import MemoryStore
from tpufleet.stores.open_store import open_store

OTHER_FOLDER = "simulated slices of this store are in"


def settings(folder: Path, **more) -> Config:
    folder.mkdir(exist_ok=True)
    return Config(home=folder, config_file=folder / "config.yaml", **more)


@pytest.fixture(params=["sqlite", "postgres"])
def store(request, tmp_path):
    url = f"sqlite:///{tmp_path}/fleet.db" if request.param == "sqlite" else postgres.fresh_url()
    store = open_store(url)
    yield store
    store.close()


def test_a_server_with_another_folder_is_refused_and_told_which_one_to_use(store, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    local_root.claim(settings(one), store)
    with pytest.raises(Conflict, match=OTHER_FOLDER) as refused:
        local_root.claim(settings(two), store)
    assert f"set TPUFLEET_DATA to {one}," in str(refused.value)
    assert "SECRET_FILE" not in str(refused.value)
    local_root.claim(settings(two, shared=one), store)
    local_root.claim(settings(one), store)


def test_a_server_without_local_is_not_concerned(tmp_path):
    store = MemoryStore()
    local_root.claim(settings(tmp_path / "two", providers=("tpu-vm",)), store)
    local_root.claim(settings(tmp_path / "one"), store)
    local_root.claim(settings(tmp_path / "two", providers=("tpu-vm",)), store)
    assert not (tmp_path / "two" / "local").exists()


def test_a_folder_that_was_moved_is_the_same(tmp_path):
    store = MemoryStore()
    local_root.claim(settings(tmp_path / "one"), store)
    (tmp_path / "one").rename(tmp_path / "moved")
    local_root.claim(settings(tmp_path / "moved"), store)
    with pytest.raises(Conflict, match=f"{tmp_path}/moved/local"):
        local_root.claim(settings(tmp_path / "one"), store)


@pytest.mark.parametrize("url, accepted", [(None, True), ("postgresql://db/fleet", False)])
def test_a_folder_that_was_deleted_is_the_same_only_on_the_machine_of_the_store(
    tmp_path, url, accepted
):
    """Other machines may have a folder, and a name, like this one."""
    store, one = MemoryStore(), settings(tmp_path / "one", store=url)
    local_root.claim(one, store)
    (tmp_path / "one" / "local" / ".id").unlink()
    if accepted:
        local_root.claim(one, store)
    else:
        with pytest.raises(Conflict, match=OTHER_FOLDER):
            local_root.claim(one, store)


def test_the_command_for_a_lost_folder_lets_another_take_its_place(tmp_path):
    store = MemoryStore()
    local_root.claim(settings(tmp_path / "one"), store)
    with pytest.raises(Conflict) as refused:
        local_root.claim(settings(tmp_path / "two"), store)
    command = str(refused.value).split("`")[1]
    assert shlex.split(command)[0] == "echo"
    subprocess.run(command, shell=True, check=True)
    local_root.claim(settings(tmp_path / "two"), store)


def test_a_restored_store_has_no_folder_yet(tmp_path):
    store = MemoryStore()
    local_root.claim(settings(tmp_path / "one"), store)
    local_root.forget(store)
    local_root.claim(settings(tmp_path / "two"), store)
    with pytest.raises(Conflict, match=OTHER_FOLDER):
        local_root.claim(settings(tmp_path / "one"), store)


@pytest.mark.parametrize("providers, copy", [(("local",), False), (("tpu-vm",), True)])
def test_a_copy_of_the_secret_is_proposed_only_where_it_is_enough(tmp_path, providers, copy):
    store = MemoryStore()
    server_files.server_secret(settings(tmp_path / "one"), store)
    with pytest.raises(Conflict, match="differs from the secret") as refused:
        server_files.server_secret(settings(tmp_path / "two", providers=providers), store)
    assert ("TPUFLEET_SECRET_FILE" in str(refused.value)) == copy
    assert "TPUFLEET_DATA" in str(refused.value)


def add_slice(folder: Path, store, server_url: str = "http://127.0.0.1:1") -> LocalProvider:
    provider = LocalProvider(folder / "local", agent=("sleep", "60"))
    provider.request(
        Order(
            id="order-a",
            slices=(SliceId("a"),),
            accelerator="v5litepod-4",
            zone="local-a",
            capacity=Capacity.ON_DEMAND,
            tokens={SliceId("a"): "t"},
            server_url=server_url,
            fleet=fleet_id(store),
        )
    )
    return provider


def test_a_server_with_another_store_is_refused_where_there_are_slices(tmp_path):
    store, one = MemoryStore(), tmp_path / "one"
    url = "postgresql://fleet:pass#word@db/fleet"
    claimed = local_root.claim(settings(one, store=url), store)
    add_slice(one, store)
    claimed.close()
    with pytest.raises(Conflict, match="simulated slices of another store") as refused:
        local_root.claim(settings(one), MemoryStore())
    message = str(refused.value)
    assert "postgresql://fleet:***@db/fleet: " in message
    assert "pass --store" in message and "word" not in message
    local_root.claim(settings(one, store=url), store).close()


def test_the_command_for_a_lost_store_lets_another_take_its_place(tmp_path):
    one = tmp_path / "one"
    add_slice(settings(one).data, MemoryStore())  # a folder of an earlier version
    with pytest.raises(Conflict, match="of another store: with") as refused:
        local_root.claim(settings(one), MemoryStore())
    command = str(refused.value).split("`")[1]
    variable, *arguments = shlex.split(command)
    assert variable == f"TPUFLEET_DATA={one}" and arguments[0] == "tpu"
    Tpu(TPUFLEET_HOME=str(tmp_path / "home"), TPUFLEET_DATA=str(one)).ok(*arguments[1:])
    local_root.claim(settings(one), MemoryStore()).close()


def test_a_server_with_another_store_is_refused_while_one_runs(tmp_path):
    """Its slices, which may be few or none now, would be deleted as soon as they exist."""
    store, one, two = MemoryStore(), tmp_path / "one", tmp_path / "two"
    running = local_root.claim(settings(one), store)
    with pytest.raises(Conflict, match=rf"in use by the server in {one} \(process \d+ on "):
        local_root.claim(settings(two, shared=one), MemoryStore())
    assert [each.home for each in local_root.live_servers(one)] == [str(one)]
    second = local_root.claim(settings(two, shared=one), store)
    assert len(local_root.live_servers(one)) == 2
    for each in (running, second):
        each.close()
    assert local_root.live_servers(one) == []
    local_root.claim(settings(two, shared=one), MemoryStore()).close()


def test_slices_of_a_store_in_memory_belong_to_nobody_after_it(tmp_path):
    store, one = MemoryStore(), tmp_path / "one"
    memory = settings(one, store="memory:")
    claimed = local_root.claim(memory, store)
    add_slice(one, store)
    claimed.close()
    local_root.claim(memory, MemoryStore()).close()


def test_a_restored_store_has_the_slices_of_its_original(tmp_path):
    """They have the same fleet, which is in the backup."""
    store, copy, one = MemoryStore(), MemoryStore(), tmp_path / "one"
    local_root.claim(settings(one), store).close()
    add_slice(one, store)
    copy.put_metadata("fleet", fleet_id(store))
    local_root.claim(settings(one, store="postgresql://db/other"), copy).close()


def test_slices_are_not_stopped_while_another_server_has_them(tmp_path):
    store, one, two = MemoryStore(), tmp_path / "one", tmp_path / "two"
    running = local_root.claim(settings(one), store)
    provider = add_slice(one, store)
    settings(two)
    stop = Tpu(TPUFLEET_HOME=str(two), TPUFLEET_DATA=str(one))
    refused = stop("serve", "--stop", "--all")
    assert refused.exit_code != 0 and f"those of the server in {one} (process" in refused.stderr
    assert f"TPUFLEET_HOME={one} tpu serve --stop" in refused.stderr
    assert [each.state for each in provider.listing()] == [CloudState.CREATING]
    assert stop("serve", "--stop").exit_code == 0
    running.close()
    assert "stopped 0 simulated slices" in stop.ok("serve", "--stop", "--all")
    assert [each.state for each in provider.listing()] == [CloudState.FAILED]

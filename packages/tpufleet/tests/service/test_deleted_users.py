"""Nothing of a user survives their deletion, also not what they write at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.service.harness import ServiceHarness
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import Conflict, Unreachable
from tpufleet.model.api_types import DeletedUser, NewChannel, NewReservation
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.reservations import Reservation
from tpufleet.model.people.notifications import Delivery, NotificationSettings
from tpufleet.model.people.preferences import PreferenceChanges, Preferences
from tpufleet.model.people.users import Role, User
from tpufleet.service.files.secrets import JobSecrets
from tpufleet.service.jobs.commands import CommandContext
from tpufleet.service.people import user_commands
from tpufleet.service.transport.auth import Caller
from tpufleet.stores.base import ChangeSet
from tpufleet.stores.memory import MemoryStore

DOCUMENTS = (NotificationSettings, Delivery, Preferences)
HOUR = timedelta(hours=1)


class StoreThatDeletesTheUser(MemoryStore):
    """Before something of theirs is written, and after all that was checked."""

    outrun = False

    def put_token(self, token: Any, **more: Any) -> None:
        self._delete(token.user)
        super().put_token(token, **more)

    def update_document(self, *arguments: Any, **more: Any) -> Any:
        self._delete(more.get("required_user", ""))
        return super().update_document(*arguments, **more)

    def _delete(self, user: str) -> None:
        if self.outrun and user == "mel":
            self.delete_user("mel")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceHarness]:
    harness = ServiceHarness(StoreThatDeletesTheUser(), tmp_path)
    pool = Pool(name="lab", provider="local", accelerator="v5litepod-8", largest=2)
    harness.store.commit(ChangeSet(pools=[pool]))
    harness.start()
    yield harness
    harness.close()


def reserve(client: FleetClient) -> None:
    client.reserve(NewReservation(id="r2", pool="lab", slices=1, duration=HOUR))


def put_channel(client: FleetClient) -> None:
    new = NewChannel(kind="webhook", address="https://hooks.example.com/x", on=("end",))
    client.put_channel("team", new)


def change_preferences(client: FleetClient) -> None:
    client.change_preferences(PreferenceChanges(config_aliases={"lr": "config.lr"}))


WRITES: dict[str, Callable[[FleetClient], object]] = {
    "token": lambda client: client.create_token(),
    "rotated token": lambda client: client.rotate_token("mel-1", HOUR),
    "reservation": reserve,
    "extended reservation": lambda client: client.extend_reservation("r1", HOUR),
    "channel": put_channel,
    "test message": lambda client: client.test_channel("first"),
    "preferences": change_preferences,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_request_that_is_outrun_by_the_deletion_of_its_user_writes_nothing(service, write):
    mel = service.client("mel")
    new = NewChannel(kind="webhook", address="https://hooks.example.com/x", on=("end",))
    mel.put_channel("first", new)
    mel.reserve(NewReservation(id="r1", pool="lab", slices=1, duration=HOUR))
    before = [service.store.documents(kind) for kind in (*DOCUMENTS, Reservation)]
    service.store.outrun = True
    with pytest.raises(Conflict, match="user mel was deleted"):
        write(mel)
    assert service.store.tokens("mel") == []
    assert [service.store.documents(kind) for kind in (*DOCUMENTS, Reservation)] == before


def test_everything_of_a_user_goes_with_them(service):
    mel = service.client("mel")
    put_channel(mel)
    mel.test_channel("team")
    change_preferences(mel)
    reserve(mel)
    mel.put_secret("hf", "hunter2")
    service.client("ada").delete_user("mel")
    assert [service.store.documents(kind) for kind in DOCUMENTS] == [[], [], []]
    assert not service.store.objects("secrets/")
    [ended] = service.store.documents(Reservation)
    assert (ended.ends_at, ended.end_reason) == (service.clock.now(), "user mel was deleted")
    messages = [each.message for each in service.client("ada").events(pool="lab").events]
    assert messages[-1] == "the reservation of mel has ended: user mel was deleted"
    reserve_again = NewReservation(id="r3", pool="lab", slices=2, duration=HOUR)
    assert service.client("mo").reserve(reserve_again).slices == 2


def test_the_deletion_of_a_user_says_what_ended_with_them(service):
    ada, mel = service.client("ada"), service.client("mel")
    ada.put_pool(replace(ada.pool("lab"), members=("mel", "mo")))
    service.submit("job-1", by="mel")
    service.submit("job-2", by="mel")
    service.end_job("job-2")
    reserve(mel)
    mel.put_secret("hf", "hunter2")
    deleted = ada.delete_user("mel")
    assert deleted == DeletedUser(jobs=1, tokens=1, secrets=1, reservations=1, pools=("lab",))
    entry = ada.audit(user="ada")[0]
    assert entry.detail == "with 1 job, 1 token, 1 secret, 1 reservation; member of lab"
    messages = [event.message for event in ada.events("job-1").events]
    assert messages[1:] == ["cancellation requested by ada: user mel was deleted"]


def test_nothing_is_left_for_a_later_user_of_the_name_if_the_server_stops_half_way(service):
    class StoreThatStops(MemoryStore):
        def delete_user(self, name: str) -> None:
            super().delete_user(name)
            raise Unreachable("the server was killed")

    store, now = StoreThatStops(), service.clock.now()
    files = JobSecrets(store, [b"k" * 32], service.clock)
    for name, role in (("ada", Role.ADMIN), ("mel", Role.MEMBER)):
        store.put_user(User(name=name, role=role, created_at=now))
    files.put("hf", "hunter2", "mel")
    store.update_document(Preferences, "mel", lambda _: Preferences(owner="mel"))
    ada = CommandContext(store=store, caller=Caller(name="ada", role=Role.ADMIN), now=now)
    with pytest.raises(Unreachable):
        user_commands.delete_user(ada, files, "mel")
    assert (files.names("mel"), store.documents(Preferences)) == ((), [])


# A later user of the same name.


def test_a_new_user_does_not_get_the_jobs_of_a_deleted_one_of_that_name(service):
    ada = service.client("ada")
    service.submit("job-1", by="mel")
    service.end_job("job-1")
    ada.delete_user("mel")
    with pytest.raises(Conflict, match=r"a deleted user mel has jobs here.*\n.*--take-over"):
        ada.put_user("mel", Role.MEMBER)
    assert service.store.user("mel") is None
    assert ada.put_user("mel", Role.MEMBER, take_over=True).name == "mel"
    [entry, *_] = ada.audit(user="ada")
    assert entry.detail == "role member (new user); takes over the jobs of a deleted user"


def test_a_deleted_user_without_jobs_can_be_added_again(service):
    ada = service.client("ada")
    ada.delete_user("mel")
    assert ada.put_user("mel", Role.VIEWER).role is Role.VIEWER


@pytest.mark.parametrize(
    ("members", "left"),
    [(("mel", "mo"), ("mo",)), (("mel",), ("ada",)), (("mo",), ("mo",)), ((), ())],
    ids=["one of two", "the only one: closed to all but admins", "not a member", "open to all"],
)
def test_a_deleted_user_is_no_longer_a_member_of_pools(service, members, left):
    ada = service.client("ada")
    ada.put_pool(replace(ada.pool("lab"), members=members))
    ada.delete_user("mel")
    assert ada.pool("lab").members == left
    message = ada.events(pool="lab").events[-1].message
    removed = "mel" in members
    assert (message == "member mel was removed: the user was deleted") is removed


def test_a_pool_of_an_admin_who_deletes_themself_is_not_open_to_all(service):
    ada = service.client("ada")
    ada.put_user("eve", Role.ADMIN)
    ada.put_pool(replace(ada.pool("lab"), members=("ada",)))
    ada.delete_user("ada")
    assert service.store.pool("lab").members == ("eve",)

"""Servers on one Postgres are told of each other's commits, and poll while they are not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from tests import postgres
from tests.chaos.own_postgres import OwnPostgres
from tests.contract import store_builders as a
from tests.frozen_postgres import FreezingProxy
from tests.polling import wait_until
from tpufleet.errors import Unreachable
from tpufleet.service.transport import event_streams
from tpufleet.service.transport.event_streams import EventHub
from tpufleet.stores.base import ChangeSet, Store, StoreChange
from tpufleet.stores.open_store import open_store
from tpufleet.stores.sql.postgres import PostgresDatabase, Timeouts, open_postgres


class Heard:
    def __init__(self, store: Store) -> None:
        self.changes: list[StoreChange] = []
        self.subscription = store.subscribe(self.changes.append)

    def until_connected(self) -> None:
        """It also announces everything once: something may have been missed."""
        wait_until(lambda: self.subscription.connected and len(self.changes) >= 2, 30)
        self.changes.clear()


@pytest.fixture
def url() -> str:
    return postgres.fresh_url()


@pytest.fixture
def pair(url: str) -> Iterator[tuple[Store, Store]]:
    with contextlib.closing(open_store(url)) as one, contextlib.closing(open_store(url)) as two:
        yield one, two


def test_a_commit_is_announced_to_the_other_server_by_what_it_added(pair):
    writer, reader = pair
    heard = Heard(reader)
    heard.until_connected()
    writer.commit(ChangeSet(events=[a.event(), a.event()]))
    wait_until(lambda: heard.changes == [StoreChange.EVENTS])
    writer.commit(ChangeSet(messages=[a.message()]))
    wait_until(lambda: heard.changes == [StoreChange.EVENTS, StoreChange.MESSAGES])
    writer.commit(ChangeSet(new_jobs=[a.job()], messages=[a.message()], events=[a.event()]))
    wait_until(lambda: len(heard.changes) == 4)


def test_a_commit_that_fails_or_adds_nothing_to_wait_for_is_not_announced(pair):
    writer, reader = pair
    heard = Heard(reader)
    heard.until_connected()
    writer.commit(ChangeSet(new_jobs=[a.job()]))
    with pytest.raises(Exception, match="j1"):
        writer.commit(ChangeSet(new_jobs=[a.job()], events=[a.event()]))
    writer.commit(ChangeSet(messages=[a.message()]))
    wait_until(lambda: heard.changes == [StoreChange.MESSAGES])


def test_fleets_in_other_schemas_of_the_database_are_not_announced(pair):
    heard = Heard(pair[1])
    heard.until_connected()
    with contextlib.closing(open_store(postgres.fresh_url())) as other:
        other.commit(ChangeSet(events=[a.event()]))
    pair[0].commit(ChangeSet(messages=[a.message()]))
    wait_until(lambda: heard.changes == [StoreChange.MESSAGES])


def test_a_lost_connection_is_replaced_and_everything_announced_again(url, pair):
    """As after a restart of the database, which ends all connections."""
    writer, reader = pair
    heard = Heard(reader)
    heard.until_connected()
    with contextlib.closing(PostgresDatabase(url)) as database:
        database.read(
            lambda session: session.rows(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE query LIKE ? AND pid <> pg_backend_pid()",
                "SELECT pg_notify%",
            )
        )
    wait_until(lambda: len(heard.changes) >= 2, 30)
    assert heard.subscription.connected
    heard.changes.clear()
    writer.commit(ChangeSet(events=[a.event()]))
    wait_until(lambda: heard.changes == [StoreChange.EVENTS])


@pytest.mark.slow
def test_a_restart_of_the_database_costs_no_announcement():
    """A real Postgres is stopped and started while one server listens and another commits."""
    database = OwnPostgres()
    try:
        url = database.fresh_url()
        with (
            contextlib.closing(open_store(url)) as writer,
            contextlib.closing(open_store(url)) as reader,
        ):
            heard = Heard(reader)
            heard.until_connected()
            for stop in (database.stop, database.kill):  # an upgrade, and a crash
                stop()
                wait_until(lambda: not heard.subscription.connected, 30)
                heard.changes.clear()
                with pytest.raises(Unreachable):
                    writer.commit(ChangeSet(events=[a.event()]))
                database.start()
                writer.commit(ChangeSet(events=[a.event()]))
                # Of this commit, or of everything: it came while the reader was not connected.
                wait_until(lambda: StoreChange.EVENTS in heard.changes, 30)
                wait_until(lambda: heard.subscription.connected, 30)
                heard.changes.clear()
                writer.commit(ChangeSet(messages=[a.message()]))
                wait_until(lambda: StoreChange.MESSAGES in heard.changes, 30)
            assert reader.last_event() == 2 and len(reader.inbox()) == 2
    finally:
        database.cleanup()


@pytest.mark.slow
def test_while_nothing_arrives_the_reader_is_told_to_poll():
    """A frozen database, a network that drops packets, or a pooler in transaction mode."""
    proxy = FreezingProxy()
    try:
        with contextlib.closing(open_postgres(proxy.url, Timeouts(notification=0.5))) as store:
            heard = Heard(store)
            heard.until_connected()
            proxy.freeze()
            wait_until(lambda: not heard.subscription.connected, 60)
            proxy.thaw()
            heard.until_connected()
    finally:
        proxy.close()


def test_a_store_without_notifications_is_polled(tmp_path):
    for url in ("memory:", f"sqlite:///{tmp_path}/fleet.db"):
        with contextlib.closing(open_store(url)) as store:
            assert not Heard(store).subscription.connected


def test_streams_are_woken_by_events_of_another_server(pair):
    """Long before the hub would look by itself."""
    writer, reader = pair

    async def seconds_until_noticed() -> float:
        hub = EventHub(reader)
        subscription = reader.subscribe(lambda change: hub.notify())
        hub.follow(subscription)
        watching = asyncio.create_task(hub.watch())
        loop = asyncio.get_running_loop()
        while not subscription.connected:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # the hub waits for notifications now
        started = loop.time()
        await asyncio.to_thread(writer.commit, ChangeSet(events=[a.event()]))
        await hub.wait(0, 30)
        took, latest = loop.time() - started, hub.latest_event
        hub.close()
        hub.notify()
        await watching
        assert latest == 1
        return took

    assert asyncio.run(seconds_until_noticed()) < event_streams.NOTIFIED_POLL_SECONDS / 2

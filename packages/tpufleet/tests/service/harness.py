"""A real server on a loopback port, over a store that the tests fill instead of a controller."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
from starlette.applications import Starlette

from tests.polling import wait_until
from tpufleet.client.fleet import FleetClient
from tpufleet.clocks import ManualClock
from tpufleet.config import DEFAULT_LOCAL_HOSTS
from tpufleet.model.api_types import NewJob
from tpufleet.model.fleet.agent_protocol import Heartbeat, HeartbeatReply
from tpufleet.model.fleet.hosts import Host, HostId, Phase, host_id
from tpufleet.model.fleet.slices import SliceId, SliceState, TpuSlice
from tpufleet.model.job.attempts import Attempt, AttemptState, attempt_id
from tpufleet.model.job.jobs import Capacity, JobId, JobState
from tpufleet.model.people.notifications import NotificationRules
from tpufleet.model.people.users import Role, Token, User
from tpufleet.model.tpu import type_lookup
from tpufleet.model.values.encoding import from_json, to_json
from tpufleet.policy.accounting import rate_limits
from tpufleet.policy.accounting.rate_limits import ConcurrencyLimit
from tpufleet.service.files.file_stores import open_file_stores
from tpufleet.service.files.secrets import derived_key
from tpufleet.service.jobs.submission import JobStorage
from tpufleet.service.notifications.channels import ChannelSecrets
from tpufleet.service.operations.server_status import AboutServer
from tpufleet.service.transport import auth
from tpufleet.service.transport.app import create_app
from tpufleet.service.transport.http_server import FleetServer, make_server
from tpufleet.service.transport.limits import RateLimiter
from tpufleet.stores.base import ChangeSet, Store
from tpufleet.web_server import listen

SECRET = b"server secret of the tests"
USERS = {"ada": Role.ADMIN, "mel": Role.MEMBER, "mo": Role.MEMBER, "vic": Role.VIEWER}
SPEC = {"name": "train", "command": ["python", "train.py"], "accelerator": "v5litepod-16"}
# Servers of tests that have ended.
MAX_STOPPING = 5
_STOPPING: deque[ServiceHarness] = deque()


class LoopGuard:
    """A store that must not be called in an event loop, because it would block all requests."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return method(*args, **kwargs)
            raise AssertionError(f"the store was called in the event loop: {name}")

        return call


class ServiceHarness:
    def __init__(
        self, store: Store, folder: Path, notifications: NotificationRules | None = None
    ) -> None:
        self.notifications = notifications or NotificationRules()
        self.store = store
        self.clock = ManualClock()
        self.woken = 0
        self.folder = folder
        self.port = 0
        self._clients: list[FleetClient] = []
        self.tokens = {name: auth.new_token() for name in USERS}
        for name, role in USERS.items():
            self.add_user(name, role)

    def add_user(self, name: str, role: Role) -> None:
        self.store.put_user(User(name=name, role=role, created_at=self.clock.now()))
        self.store.put_token(
            Token(
                id=f"{name}-1",
                user=name,
                hash=auth.token_hash(self.tokens[name]),
                created_at=self.clock.now(),
            )
        )

    # The server.

    def start(
        self,
        make_server: Callable[[Starlette], FleetServer] = make_server,
        limiter: RateLimiter | None = None,
        public_url: str = "",
        concurrency: ConcurrencyLimit = rate_limits.CONCURRENT_PER_USER,
    ) -> None:
        store = cast(Store, LoopGuard(self.store))
        keys = [derived_key(SECRET)]
        files = open_file_stores(self.folder, store, self.clock, keys, snapshot_limit=1024 * 1024)
        self.app = create_app(
            store=store,
            clock=self.clock,
            secret=SECRET,
            files=files,
            storage=JobStorage(
                snapshots=files.snapshots,
                secrets=files.secrets,
                checkpoints=str(self.folder / "checkpoints"),
                state=str(self.folder),
                providers=("local", "tpu-vm"),
                local_hosts=DEFAULT_LOCAL_HOSTS,
            ),
            server=AboutServer(public_url=public_url),
            channel_secrets=ChannelSecrets(keys),
            wake=self._wake,
            faults=("preempt", "kill-host"),
            notifications=self.notifications,
            limiter=limiter,
            concurrency=concurrency,
        )
        listener = listen(f"127.0.0.1:{self.port}")
        self.port = listener.getsockname()[1]
        self.server = make_server(self.app)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]})
        self._thread.start()
        wait_until(lambda: self.server.started, interval=0.002)

    def stop(self) -> float:
        """Returns how many seconds it took."""
        started = time.monotonic()
        self.server.should_exit = True
        self._thread.join(timeout=900)
        assert not self._thread.is_alive(), "the server did not stop"
        return time.monotonic() - started

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.stop()

    def close_soon(self) -> None:
        """Like `close`, without waiting: a server looks ten times a second whether to stop."""
        for client in self._clients:
            client.close()
        self.server.should_exit = True
        _STOPPING.append(self)
        if len(_STOPPING) > MAX_STOPPING:
            _STOPPING.popleft().stop()

    def _wake(self) -> None:
        self.woken += 1

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, name: str = "mel", **more: Any) -> FleetClient:
        client = FleetClient(self.url, self.tokens[name], **{"timeout": 900.0, **more})
        self._clients.append(client)
        return client

    def http(self, token: str | None = None) -> httpx.Client:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        # Plain HTTP: without certificates, whose loading takes longer than most tests.
        return httpx.Client(
            base_url=self.url + "/api/v1",
            headers=headers,
            verify=False,
            trust_env=False,
            timeout=900,
        )

    # What a controller would do.

    def submit(self, job_id: str = "job-1", by: str = "mel", **spec: Any) -> JobId:
        with FleetClient(self.url, self.tokens[by], timeout=900) as client:
            new = NewJob(id=JobId(job_id), spec={**SPEC, **spec})
            return client.submit([new])[0].id

    def change_job(self, job_id: str, **changes: Any) -> None:
        job = self.store.job(JobId(job_id))
        assert job is not None
        self.store.commit(ChangeSet(jobs=[replace(job, **changes)]))

    def end_job(self, job_id: str, state: JobState = JobState.FAILED, **more: Any) -> None:
        self.change_job(job_id, state=state, ended_at=self.clock.now(), **more)

    def add_slice(
        self, name: str, job_id: str | None, *, with_hosts: bool = True, **more: Any
    ) -> TpuSlice:
        fields = dict(
            id=SliceId(name),
            provider="local",
            accelerator="v5litepod-16",
            zone="local-a",
            capacity=Capacity.SPOT,
            request_group="group",
            requested_at=self.clock.now(),
            job_id=job_id,
            state=SliceState.READY,
        )
        tpu_slice = TpuSlice(**{**fields, **more})  # type: ignore[arg-type]
        hosts = [
            Host(
                id=host_id(tpu_slice.id, index),
                slice_id=tpu_slice.id,
                index=index,
                address=f"10.0.{name[-1]}.{index}",
                coordinator_port=8476,
                boot="boot",
                up_at=self.clock.now(),
            )
            for index in range(type_lookup.find(tpu_slice.accelerator).hosts)
        ]
        self.store.commit(ChangeSet(slices=[tpu_slice], hosts=hosts if with_hosts else []))
        return tpu_slice

    def add_attempt(self, job_id: str, number: int, *slices: str, **more: Any) -> Attempt:
        attempt = Attempt(
            id=attempt_id(JobId(job_id), number),
            job_id=JobId(job_id),
            number=number,
            slices=tuple(SliceId(name) for name in slices),
            created_at=self.clock.now(),
            **{"state": AttemptState.RUNNING, **more},
        )
        self.store.commit(ChangeSet(attempts=[attempt]))
        return attempt

    # What an agent would do.

    def make_heartbeat(self, host: str, **more: Any) -> Heartbeat:
        """The heartbeat of an agent with nothing new to report."""
        row = self.store.host(HostId(host))
        fields = dict(
            host_id=HostId(host),
            boot=row.boot if row else "boot",
            at=self.clock.now(),
            address=row.address if row else "10.0.9.9",
            coordinator_port=row.coordinator_port if row else 8476,
            phase=row.phase if row else Phase.IDLE,
        )
        return Heartbeat(**{**fields, **more})  # type: ignore[arg-type]

    def slice_token(self, slice_id: str) -> str:
        return auth.slice_token(SECRET, SliceId(slice_id))

    def send_heartbeat(self, host: str, **more: Any) -> HeartbeatReply:
        with self.http(self.slice_token(host.partition("/")[0])) as http:
            answer = http.post(
                "/agent/heartbeat", content=to_json(self.make_heartbeat(host, **more))
            )
        assert answer.status_code == 200, answer.text
        return from_json(answer.content, HeartbeatReply)

    def send_log(self, attempt: str, host: str, offset: int, data: bytes) -> httpx.Response:
        with self.http(self.slice_token(host.partition("/")[0])) as http:
            params = {"attempt": attempt, "host": host, "offset": offset}
            return http.post("/agent/logs", params=params, content=data)

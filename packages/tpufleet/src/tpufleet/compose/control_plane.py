"""The server: store, providers, controller and HTTP API in one process."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from tpufleet.clocks import SystemClock
from tpufleet.compose import (
    backup,
    local_root,
    secrets_key,
    server_files,
    server_log,
    startup_preflight,
)
from tpufleet.compose.providers import fleet_id, providers
from tpufleet.config import Config
from tpufleet.controller.loop import Controller
from tpufleet.controller.placement_inputs import ControllerSettings
from tpufleet.controller.provider_calls import thread_executor
from tpufleet.errors import BadInput
from tpufleet.model.people import budgets, notifications, retention_rules
from tpufleet.model.people.users import TOKEN_PREFIX, Role, Token, User
from tpufleet.model.tpu import prices
from tpufleet.providers.base import Fault, Provider
from tpufleet.providers.local.provider import LocalProvider
from tpufleet.service.files.file_stores import open_file_stores
from tpufleet.service.files.secrets import derived_key
from tpufleet.service.files.shared_logs import SegmentArchive
from tpufleet.service.jobs.submission import JobStorage
from tpufleet.service.notifications.channels import ChannelSecrets
from tpufleet.service.operations.metrics import ServerMetrics
from tpufleet.service.operations.recent_errors import RecentErrors
from tpufleet.service.operations.server_status import AboutServer
from tpufleet.service.transport import auth
from tpufleet.service.transport.app import create_app
from tpufleet.service.transport.event_streams import EventHub
from tpufleet.service.transport.http_server import FleetServer, make_server
from tpufleet.stores.base import ChangeSet, Store, StoreChange
from tpufleet.stores.open_store import open_store
from tpufleet.stores.sql import schema_migrations

log = logging.getLogger("tpufleet.serve")

ADMIN = "admin"  # user of the token in `admin_token_file`
ADMIN_TOKEN_NOTE = "from admin_token_file"
# Simulated hosts boot within seconds.
LOCAL_BOOT_TIMEOUT = timedelta(minutes=2)
# The controller computes while the API responds: switch threads more often than Python's 5 ms. Each
# system call of the API may wait this long.
SWITCH_INTERVAL_SECONDS = 0.0001


def serve(settings: Config, *, embedded: bool) -> int:
    """Run the server until SIGTERM or SIGINT. Returns the exit status."""
    recent_errors = server_log.set_up(settings.log_format)
    if settings.ca_file is not None:
        os.environ["TPUFLEET_CA_FILE"] = str(settings.ca_file)  # for the agents that we start
    server_files.forbid_writes_of_others()
    home = settings.home
    for folder in (home, settings.data):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Keeps tokens and secrets out of code snapshots and commits.
        (folder / ".gitignore").write_text("*\n")
    server_files.make_private(home)
    for name in ("fleet.db", "token"):
        server_files.require_private(home / name)
    with (
        server_files.exclusive_lock(home),
        contextlib.closing(_open_store(settings)) as store,
    ):
        control_plane = ControlPlane(settings, store, providers(settings, store), recent_errors)
        if {"tpu-vm", "compute"} & set(settings.enabled_providers):
            startup_preflight.check_cloud_once(settings)
        control_plane.run()
    return 0


def _open_store(settings: Config) -> Store:
    url, newest = settings.store_url, schema_migrations.newest_version()
    if (saved := backup.before_migration(settings, url, newest)) is not None:
        log.info("backed up the database to %s before migrating it", saved)
    return open_store(url)


class ControlPlane:
    """One server: the HTTP API in the main thread, the controller in another."""

    def __init__(
        self,
        settings: Config,
        store: Store,
        providers: Mapping[str, Provider],
        recent_errors: RecentErrors | None = None,
    ) -> None:
        self._recent_errors = recent_errors
        self._settings = settings
        self._store = store
        self._providers = providers
        self._clock = SystemClock()
        self._name = server_files.lease_holder(settings)
        home = settings.home
        self._secret = server_files.server_secret(settings, store)
        # Of a server that may use the store.
        self._local_claim = local_root.claim(settings, store)
        if settings.admin_token_file is not None:
            self._register_admin_token(settings.admin_token_file)
        else:
            self._create_local_admin(home / "token")
        self._listener = server_files.listen_on_previous_port(settings.listen, home / "port")
        host, port = self._listener.getsockname()[:2]
        self._scheme = "http" if settings.tls_cert is None else "https"
        self.url = f"{self._scheme}://{server_files.advertised_host(host)}:{port}"
        self._server = self._http_server()
        self._controller = self._make_controller()
        self._subscription = store.subscribe(self._on_store_change)
        self._hub.follow(self._subscription)

    def run(self) -> None:
        home = self._settings.home
        for provider in self._providers.values():
            if isinstance(provider, LocalProvider):
                provider.start()
        self._controller.start()
        server_file = home / "server.json"
        server_files.write_private(server_file, json.dumps(self._record()))
        print(f"server at {self.url} (state in {home})", flush=True)
        sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
        try:
            self._server.run(sockets=[self._listener])
        finally:
            server_file.unlink(missing_ok=True)
            self._subscription.close()
            self._controller.stop()
            for provider in self._providers.values():
                provider.close()
            if self._local_claim is not None:
                self._local_claim.close()

    def _record(self) -> dict[str, Any]:
        """For commands on this machine: they connect to loopback, and trust our certificate."""
        host, port = self._listener.getsockname()[:2]
        here = server_files.local_host(host)
        record = {
            "url": f"{self._scheme}://{here}:{port}",
            "pid": os.getpid(),
            "data": str(self._settings.data),
        }
        cert = self._settings.tls_cert
        return record if cert is None else {**record, "certificate": str(cert)}

    def _http_server(self) -> FleetServer:
        settings = self._settings
        derived = derived_key(self._secret)
        keys = [key for key in (secrets_key.secrets_key(settings, self._store), derived) if key]
        bucket = _bucket(settings)
        files = open_file_stores(
            settings.data,
            self._store,
            self._clock,
            keys,
            archive=bucket,
            shared=bucket is not None and settings.shares_files,
            snapshot_limit=settings.snapshot_limit,
            log_limit=settings.log_limit,
        )
        if not settings.shares_files:  # else other servers accept requests
            files.secrets.encrypt_again()
        local = [each for each in self._providers.values() if isinstance(each, LocalProvider)]
        app = create_app(
            store=self._store,
            clock=self._clock,
            secret=self._secret,
            files=files,
            storage=JobStorage(
                snapshots=files.snapshots,
                secrets=files.secrets,
                checkpoints=f"{settings.bucket or settings.data}/checkpoints",
                state=str(settings.data),
                providers=tuple(self._providers),
                default_provider=settings.default_provider,
                local_containers=settings.local_containers,
                tpu_vm_containers=any(
                    (section or {}).get("containers")
                    for section in (settings.tpu_vm, settings.compute)
                ),
                local_hosts=settings.local_hosts,
            ),
            server=AboutServer(
                name=self._name,
                started_at=self._clock.now(),
                public_url=settings.public_url or "",
                announced=settings.store is not None,
                recent_errors=self._recent_errors,
                local_jobs=local[0].jobs if local else None,
            ),
            channel_secrets=ChannelSecrets(keys),
            wake=self._wake,
            faults=tuple(fault.value for fault in Fault),
            tokens_per_user=settings.tokens_per_user,
            retention=retention_rules.parse(settings.retention),
            notifications=notifications.parse_rules(settings.notifications),
            prices=prices.price_table(settings.prices),
        )
        self._hub: EventHub = app.state.hub
        self._metrics: ServerMetrics = app.state.metrics
        return make_server(app, tls_cert=self._settings.tls_cert, tls_key=self._settings.tls_key)

    def _make_controller(self) -> Controller:
        default = self._settings.default_provider
        return Controller(
            self._store,
            self._providers,
            self._clock,
            executor=thread_executor(),
            holder=self._name,
            fleet=fleet_id(self._store),
            server_url=self._settings.public_url or self.url,
            ca_certificates=server_files.ca_certificates(self._settings.ca_file),
            slice_token=lambda slice_id: auth.slice_token(self._secret, slice_id),
            bootstrap_token=lambda slice_id: auth.bootstrap_token(self._secret, slice_id),
            settings=ControllerSettings(
                default_providers=(default,),
                zones_by_provider={name: item.zones for name, item in self._providers.items()},
                slices_per_user=self._settings.slices_per_user,
                fair_share_half_life=self._settings.fair_share_half_life,
                max_hosts_lost_percent=self._settings.max_hosts_lost_percent,
                budgets=budgets.parse(self._settings.budgets),
                prices=prices.price_table(self._settings.prices),
                boot_timeout_by_provider={LocalProvider.name: LOCAL_BOOT_TIMEOUT},
            ),
            on_commit=self._on_commit,
        )

    def _wake(self) -> None:
        self._controller.wake()

    def _on_commit(self, change: ChangeSet) -> None:
        self._hub.notify()
        self._metrics.count_recoveries(change.attempts)

    def _on_store_change(self, change: StoreChange) -> None:
        """Another server committed, or this one."""
        if change is StoreChange.EVENTS:
            self._hub.notify()
        else:
            self._controller.wake_if_leading()

    def _register_admin_token(self, path: Path) -> None:
        """Accept the token in this file, and no longer one that was in it before. `sha256:` and
        its hash are enough."""
        value = server_files.read_mounted_secret(path, "admin_token_file")
        hashed = re.fullmatch(r"sha256:([0-9a-f]{64})", value)
        if hashed is None and not value.startswith(TOKEN_PREFIX):
            raise BadInput(f"admin_token_file: the token in {path} must start with {TOKEN_PREFIX}")
        digest, now = hashed[1] if hashed else auth.token_hash(value), self._clock.now()
        if self._store.user(ADMIN) is None:
            self._store.put_user(User(name=ADMIN, role=Role.ADMIN, created_at=now))
        for token in self._store.tokens(ADMIN):
            if token.note == ADMIN_TOKEN_NOTE and token.hash != digest:
                self._store.delete_token(token.id)
        if self._store.token_by_hash(digest) is None:
            # All servers give it the same id, so it is stored once.
            self._store.put_token(
                Token(id=digest[:8], user=ADMIN, hash=digest, created_at=now, note=ADMIN_TOKEN_NOTE)
            )

    def _create_local_admin(self, path: Path) -> None:
        """Make the local user an admin, with a token file that only they can read."""
        token = path.read_text().strip() if path.exists() else ""
        known = self._store.token_by_hash(auth.token_hash(token)) if token else None
        name, now = server_files.user_name(), self._clock.now()
        if known is not None and not known.expired(now):
            return
        if self._store.user(name) is None:
            self._store.put_user(User(name=name, role=Role.ADMIN, created_at=now))
        token = auth.new_token()
        self._store.put_token(
            Token(
                id=secrets.token_hex(4),
                user=name,
                hash=auth.token_hash(token),
                created_at=now,
                note=f"created by the server in {path}",
            )
        )
        server_files.write_private(path, token + "\n")


def _bucket(settings: Config) -> SegmentArchive | None:
    """Keeps code, results and logs instead of this disk."""
    if settings.bucket is None:
        return None
    from tpufleet.runtime.gcs import Bucket

    return Bucket(settings.bucket)

"""Builds the control plane from its parts. Concrete stores and providers are named here alone."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import hashlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpufleet.clocks import SystemClock
from tpufleet.config import Settings
from tpufleet.controller.act import thread_executor
from tpufleet.controller.loop import Controller
from tpufleet.controller.reconcile import Settings as ControllerSettings
from tpufleet.errors import BadInput, Conflict
from tpufleet.model.users import Role, Token, User
from tpufleet.providers.base import Fault, Provider
from tpufleet.providers.local import faults
from tpufleet.providers.local.provider import LocalProvider
from tpufleet.service import auth
from tpufleet.service.routes import Deps
from tpufleet.service.server import create_app
from tpufleet.service.serving import FleetServer, server_for
from tpufleet.stores.base import Store
from tpufleet.stores.opening import open_store

if TYPE_CHECKING:
    from tpufleet.views.cli.emulating import EmulatorOptions
    from tpufleet.views.cli.fleets import Nodes

log = logging.getLogger("tpufleet.serve")

# Simulated hosts boot in seconds; one that has not by then never will.
LOCAL_BOOT_LIMIT = timedelta(minutes=2)
SWITCH_SECONDS = 0.001


def serve(settings: Settings, *, embedded: bool) -> int:
    """Run the control plane until it is told to end. The exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    home = settings.home
    for folder in (home, settings.data):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Tokens and secrets lie here: no snapshot of a job's code takes them along, and no commit.
        (folder / ".gitignore").write_text("*\n")
    with _alone_in(home), contextlib.closing(open_store(store_url(settings))) as store:
        ControlPlane(settings, store, providers(settings, store)).run()
    return 0


def store_url(settings: Settings) -> str:
    return settings.store or f"sqlite:///{settings.home / 'fleet.db'}"


class ControlPlane:
    """One server: the HTTP API in the main thread, the controller in another."""

    def __init__(
        self, settings: Settings, store: Store, sources: Mapping[str, Provider]
    ) -> None:
        self._settings = settings
        self._store = store
        self._providers = sources
        self._clock = SystemClock()
        home = settings.home
        self._secret = server_secret(settings.data / "secret", store)
        self._make_local_admin(home / "token")
        self._listener = _listen_again(settings.listen, home / "port")
        host, port = self._listener.getsockname()[:2]
        self.url = f"http://{_reachable(host)}:{port}"
        self._server = self._http_server()
        self._controller = self._make_controller()

    def run(self) -> None:
        home = self._settings.home
        for provider in self._providers.values():
            if isinstance(provider, LocalProvider):
                provider.start()
        self._controller.start()
        described = home / "server.json"
        _write_private(described, json.dumps({"url": self.url, "pid": os.getpid()}))
        log.info("serving at %s", self.url)
        print(f"control plane at {self.url} (state in {home})", flush=True)
        # The controller computes while the API answers: hand the interpreter over sooner.
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            self._server.run(sockets=[self._listener])
        finally:
            described.unlink(missing_ok=True)
            self._controller.stop()
            for provider in self._providers.values():
                provider.close()

    def _http_server(self) -> FleetServer:
        app = create_app(
            Deps(
                store=self._store,
                clock=self._clock,
                secret=self._secret,
                state=self._settings.data,
                wake=self._wake,
                snapshot_limit=self._settings.snapshot_limit,
                providers=tuple(self._providers),
                faults=tuple(fault.value for fault in Fault),
                **_kept_in(self._settings.bucket),
            )
        )
        self._hub = app.state.hub
        return server_for(app)

    def _make_controller(self) -> Controller:
        default = self._settings.provider
        if default not in self._providers:
            raise BadInput(f"provider: {default!r} is not one of {', '.join(self._providers)}")
        return Controller(
            self._store,
            self._providers,
            self._clock,
            executor=thread_executor(),
            holder=_holder(self._settings),
            fleet=fleet_id(self._store),
            server_url=self._settings.public_url or self.url,
            slice_token=lambda slice_id: auth.slice_token(self._secret, slice_id),
            settings=ControllerSettings(
                default_providers=(default,),
                zones_of={name: item.zones for name, item in self._providers.items()},
                slices_per_user=self._settings.slices_per_user,
                boot_limit_of={LocalProvider.name: LOCAL_BOOT_LIMIT},
            ),
            on_commit=lambda: self._hub.ring(),
        )

    def _wake(self) -> None:
        self._controller.wake()

    def _make_local_admin(self, path: Path) -> None:
        """The person at this machine is an admin, by a token file that only they can read."""
        token = path.read_text().strip() if path.exists() else ""
        if token and self._store.token_by_hash(auth.hash_of(token)):
            return
        name, now = _user_name(), self._clock.now()
        if self._store.user(name) is None:
            self._store.put_user(User(name=name, role=Role.ADMIN, created_at=now))
        token = auth.new_token()
        self._store.put_token(
            Token(
                id=secrets.token_hex(4),
                user=name,
                hash=auth.hash_of(token),
                created_at=now,
                note=f"made by the server for {path}",
            )
        )
        _write_private(path, token + "\n")


def providers(settings: Settings, store: Store) -> dict[str, Provider]:
    """Every source of slices that this server can use."""
    plan_file = settings.data / "faults.yaml"
    plan = faults.load(plan_file) if plan_file.exists() else faults.NO_FAULTS
    found: dict[str, Provider] = {"local": LocalProvider(settings.data / "local", plan=plan)}
    if settings.tpu_vm is not None:
        found["tpu-vm"] = _tpu_vm(settings, store)
    if settings.gke is not None:
        found["gke"] = _gke(settings.gke, store)
    return found


def _gke(written: Mapping[str, Any], store: Store) -> Provider:
    from tpufleet.providers.gke import opening

    try:
        return opening.open_provider(written, fleet=fleet_id(store), clock=SystemClock())
    except ImportError as error:
        raise BadInput(
            f"GKE needs {error.name}; run `pip install 'tpufleet[k8s]'`"
        ) from error


def _tpu_vm(settings: Settings, store: Store) -> Provider:
    try:
        from tpufleet.providers.tpu_vm import settings as tpu_vm
        from tpufleet.providers.tpu_vm.provider import TpuVmProvider
    except ImportError as error:
        raise _no_client(error) from error
    read = tpu_vm.read(settings.tpu_vm or {})
    return TpuVmProvider(read, fleet=fleet_id(store), folder=settings.data / "tpu-vm")


def nodes(settings: Settings, project: str | None, tell: Callable[[str], None]) -> Nodes:
    """TPU VMs by hand, with the credentials of whoever sits here."""
    try:
        from tpufleet.providers.tpu_vm import api, byhand
        from tpufleet.providers.tpu_vm import settings as tpu_vm
    except ImportError as error:
        raise _no_client(error) from error
    written = dict(settings.tpu_vm or {})
    project = project or written.get("project") or os.environ.get("GOOGLE_CLOUD_PROJECT")
    if not project:
        raise BadInput("which project? Give --project, or tpu_vm.project in the config file")
    read = tpu_vm.read({"zones": ["us-central1-a"], **written, "project": project})
    return byhand.Nodes(api.Api(lambda: api.connect(read.endpoint)), read, tell)


def _kept_in(bucket: str | None) -> dict[str, Any]:
    """Where checkpoints, code and logs are kept, when not on this disk."""
    if bucket is None:
        return {}
    from tpufleet.runtime.buckets import Bucket

    return {"archive": Bucket(bucket), "checkpoints": f"{bucket}/checkpoints"}


def _no_client(error: ImportError) -> BadInput:
    return BadInput(
        f"TPU VMs need Google's client ({error.name} is missing); "
        "run `pip install 'tpufleet[tpu-vm]'`"
    )


def emulate(options: EmulatorOptions) -> int:
    """Run a Cloud TPU API until told to end. The exit status."""
    try:
        from tpufleet.emulator import plans, stock
        from tpufleet.emulator.cloud import ZONES, Pace
        from tpufleet.emulator.running import Emulator
    except ImportError as error:
        raise _no_client(error) from error
    limits = tuple(stock.Limit(zone=zone, most=most) for zone, most in options.nodes.items())
    emulator = Emulator(
        zones=options.zones or ZONES,
        stock=stock.Stock(nodes=limits),
        pace=Pace(boot=options.boot, deletion=timedelta(seconds=2), notice=options.notice),
        plan=plans.load(options.plan) if options.plan else plans.NO_TROUBLE,
        agents=options.folder,
        address=options.listen,
    )
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with emulator:
        print(f"Cloud TPU API at {emulator.endpoint} (tpu_vm.endpoint in the config)", flush=True)
        ended.wait()
    return 0


def clear_local_slices(home: Path) -> None:
    """Take away every simulated slice of this state folder, when no server runs there."""
    LocalProvider(home / "local").release_all()


def fleet_id(store: Store) -> str:
    """The label that marks slices as this installation's."""
    found = store.fact("fleet")
    if found is None:
        store.put_fact("fleet", secrets.token_hex(4))
        found = store.fact("fleet")
    assert found is not None
    return found


def server_secret(path: Path, store: Store) -> bytes:
    """What slice tokens follow from. Servers that share a store share this file, and with it the
    folder that it is in."""
    if not path.exists():
        _write_private(path, secrets.token_hex(32) + "\n")
    secret = path.read_text().strip().encode()
    fingerprint = hashlib.sha256(b"fingerprint:" + secret).hexdigest()[:16]
    known = store.fact("secret fingerprint")
    if known is None:
        store.put_fact("secret fingerprint", fingerprint)
    elif known != fingerprint:
        raise Conflict(
            f"{path} is not the secret of the servers that use this store; they share one folder "
            "for it, for code, logs, checkpoints and slices: set TPUFLEET_DATA to it"
        )
    return secret


@contextlib.contextmanager
def _alone_in(home: Path) -> Iterator[None]:
    """One server in one state folder."""
    with open(home / "serve.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Conflict(
                f"a control plane already runs in {home}; `tpu serve --stop` ends it"
            ) from error
        yield


def _holder(settings: Settings) -> str:
    """Who holds the controller's lease. One server alone uses the store in its state folder, so
    the next one there is the same holder and need not wait for the lease of one that died."""
    if settings.store is None:
        return "the server of this folder"
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


def _listen_again(address: str, memory: Path) -> socket.socket:
    """Where any port will do, the one of last time: agents that outlived the server call there."""
    host, _, port = address.rpartition(":")
    if int(port) != 0:
        return _listen(address)
    try:
        listener = _listen(f"{host}:{int(memory.read_text())}")
    except (FileNotFoundError, ValueError, BadInput):
        listener = _listen(address)
    _write_private(memory, f"{listener.getsockname()[1]}\n")
    return listener


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named, for asyncio turns off Nagle's delay (40 ms a call) only then.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), int(port)))
    except OSError as error:
        raise BadInput(f"listen: cannot use {address}: {error.strerror}") from error
    listener.listen(2048)
    return listener


def _reachable(host: str) -> str:
    """An address that agents can call when the server listens everywhere."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user-{os.getuid()}"


def _write_private(path: Path, text: str) -> None:
    """Readable by its owner alone from the first byte on; never half written."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    os.replace(draft, path)

"""Which folder has the simulated slices of a store, and which servers control them. A server with
another folder would take the slices for preempted, and run their jobs a second time; one with
another store would delete them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tpufleet.compose.providers import fleet_id
from tpufleet.compose.server_files import write_private
from tpufleet.config import Config, redacted_store
from tpufleet.errors import Conflict
from tpufleet.model.values import encoding
from tpufleet.providers.local.provider import LocalProvider
from tpufleet.providers.local.slice_records import SliceRecords
from tpufleet.stores.base import Store

_METADATA = "local root"
# In the folder; they move with it.
_ID_FILE = ".id"
_LAST_SERVER = ".server.json"  # a LocalServer
_SERVERS = ".servers"  # a LocalServer in each file, which that server has locked
_MEMORY = "memory:"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRoot:
    id: str
    host: str  # name of the machine
    folder: str

    @property
    def location(self) -> tuple[str, str]:
        return self.host, self.folder


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalServer:
    """A server that controls the simulated slices of a folder."""

    fleet: str  # label of its slices
    store: str  # URL without its password
    home: str
    host: str
    pid: int

    @property
    def description(self) -> str:
        return f"the server in {self.home} (process {self.pid} on {self.host})"


class FolderClaim:
    """Held by a server as long as it controls the simulated slices of a folder."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self._path, self._file = path, file

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()


def claim(settings: Config, store: Store) -> FolderClaim | None:
    """Conflict when the simulated slices of the store are in another folder, or when this folder
    has those of another store. None: the provider is off."""
    if LocalProvider.name not in settings.enabled_providers:
        return None
    folder = settings.data.resolve() / "local"
    own_folder = LocalRoot(id=_folder_id(folder), host=socket.gethostname(), folder=str(folder))
    own_server = LocalServer(
        fleet=fleet_id(store),
        store=redacted_store(settings.store_url),
        home=str(settings.home.resolve()),
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    records = SliceRecords(folder)
    with records.lock():  # against servers that start at the same time
        _refuse_another_store(records, own_server)
        _refuse_another_folder(settings, store, own_folder)
        write_private(folder / _LAST_SERVER, encoding.to_json(own_server).decode())
        return _register(folder, own_server)


def live_servers(data: Path) -> list[LocalServer]:
    """The servers that control the simulated slices in this data folder."""
    servers = []
    for path in sorted((data / "local" / _SERVERS).glob("*.json")):
        try:
            with path.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            continue
        except BlockingIOError:
            with contextlib.suppress(FileNotFoundError):
                servers.append(encoding.from_json(path.read_bytes(), LocalServer))
        else:
            path.unlink(missing_ok=True)  # of a server that was killed
    return servers


def refuse_other_servers(data: Path, home: Path) -> None:
    """Conflict while a server of another state folder controls the simulated slices."""
    others = [each for each in live_servers(data) if each.home != str(home.resolve())]
    if others:
        raise Conflict(
            f"the simulated slices in {data / 'local'} are those of {others[0].description} too, "
            "which would run their jobs again\n"
            f"  next: TPUFLEET_HOME={others[0].home} tpu serve --stop, then repeat this command; "
            "or `tpu serve --stop` without --all stops only the server of this state folder"
        )


def _register(folder: Path, server: LocalServer) -> FolderClaim:
    path = folder / _SERVERS / f"{server.pid}-{secrets.token_hex(4)}.json"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    draft = path.with_suffix(".draft")
    file = os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")
    file.write(encoding.to_json(server).decode())
    file.flush()
    fcntl.flock(file, fcntl.LOCK_EX)
    draft.rename(path)
    return FolderClaim(path, file)


def _refuse_another_store(records: SliceRecords, own: LocalServer) -> None:
    folder = records.root
    others = [each for each in live_servers(folder.parent) if each.fleet != own.fleet]
    last = _last_server(folder)
    # What was in memory is lost: nobody needs its slices.
    kept = {own.fleet, *([last.fleet] if last and last.store == _MEMORY and not others else [])}
    fleets = {each.fleet for each in records.all() if not each.over} - kept
    if not others and not fleets:
        return
    known = [*others, *([last] if last else [])]
    store = next((each.store for each in known if not fleets or each.fleet in fleets), "")
    used = "".join(f"\n  in use by {each.description}" for each in others)
    stop = f"`TPUFLEET_DATA={folder.parent} tpu serve --stop --all`"
    lost = f"\n  if that store is lost: {stop} stops its slices" if not others else ""
    raise Conflict(
        f"{folder} has the simulated slices of another store{f', {store}' if store else ''}: with "
        f"{own.store}, they would be unknown and deleted{used}\n"
        "  next: pass --store URL of that store, or set TPUFLEET_STORE; for a fleet of its own, "
        f"set TPUFLEET_DATA or TPUFLEET_HOME to another folder{lost}"
    )


def _last_server(folder: Path) -> LocalServer | None:
    try:
        return encoding.from_json((folder / _LAST_SERVER).read_bytes(), LocalServer)
    except FileNotFoundError:  # no server has used it
        return None


def _refuse_another_folder(settings: Config, store: Store, own: LocalRoot) -> None:
    restored = store.metadata(_METADATA) == ""
    store.put_metadata(_METADATA, encoding.to_json(own).decode(), replace=restored)
    known = encoding.from_json((store.metadata(_METADATA) or "").encode(), LocalRoot)
    if known == own:
        return
    # The folder was moved; or its content was deleted, and the database is on this machine too.
    if known.id != own.id and (known.location != own.location or _is_shared(settings)):
        raise Conflict(
            f"the simulated slices of this store are in {known.folder} on {known.host}, not in "
            f"{own.folder}: their jobs would run a second time here\n"
            f"  next: set TPUFLEET_DATA to {Path(known.folder).parent}, for servers on that "
            "machine; or leave local out of TPUFLEET_PROVIDERS\n"
            "  if that folder is lost, and no server uses it: "
            f"`echo {known.id} > {Path(own.folder) / _ID_FILE}`"
        )
    store.put_metadata(_METADATA, encoding.to_json(own).decode())


def forget(store: Store) -> None:
    """Of a restored store: the next server's folder is that of its slices."""
    if store.metadata(_METADATA) is not None:
        store.put_metadata(_METADATA, "")


def _is_shared(settings: Config) -> bool:
    return settings.store is not None and not settings.store.startswith("sqlite:")


def _folder_id(folder: Path) -> str:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / _ID_FILE
    if not path.exists():
        draft = folder / f"{_ID_FILE}.{secrets.token_hex(4)}"
        write_private(draft, secrets.token_hex(8) + "\n")
        with contextlib.suppress(FileExistsError):  # of another server, which was faster
            os.link(draft, path)
        draft.unlink()
    return path.read_text().strip()

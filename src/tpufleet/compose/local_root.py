"""Which folder has the simulated slices of a store. A server with another folder would take those
slices for preempted, and run their jobs a second time."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from tpufleet.compose.server_files import write_private
from tpufleet.config import Config
from tpufleet.errors import Conflict
from tpufleet.model import encoding
from tpufleet.providers.local.provider import LocalProvider
from tpufleet.stores.base import Store

_METADATA = "local root"
_ID_FILE = ".id"  # in the folder; moves with it


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRoot:
    id: str
    host: str  # name of the machine
    folder: str

    @property
    def location(self) -> tuple[str, str]:
        return self.host, self.folder


def claim(settings: Config, store: Store) -> None:
    """Conflict when the simulated slices of the store are in another folder."""
    if LocalProvider.name not in settings.enabled_providers:
        return
    folder = settings.data.resolve() / "local"
    own = LocalRoot(id=_folder_id(folder), host=socket.gethostname(), folder=str(folder))
    restored = store.metadata(_METADATA) == ""
    store.put_metadata(_METADATA, encoding.to_json(own).decode(), replace=restored)
    known = encoding.from_json((store.metadata(_METADATA) or "").encode(), LocalRoot)
    if known == own:
        return
    # The folder was moved; or its content was deleted, and the database is on this machine too.
    if known.id != own.id and (known.location != own.location or _is_shared(settings)):
        raise Conflict(
            f"the simulated slices of this store are in {known.folder} on {known.host}, not in "
            f"{folder}: their jobs would run a second time here\n"
            f"  next: set TPUFLEET_DATA to {Path(known.folder).parent}, for servers on that "
            "machine; or leave local out of TPUFLEET_PROVIDERS\n"
            "  if that folder is lost, and no server uses it: "
            f"`echo {known.id} > {folder / _ID_FILE}`"
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

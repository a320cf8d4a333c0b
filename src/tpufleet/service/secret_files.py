"""Secrets: one file each that only the server's user can read. Never in the database or a log."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tpufleet.errors import BadInput, NotFound
from tpufleet.service import names

LARGEST = 64 * 1024  # it becomes an environment variable


class SecretFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> tuple[str, ...]:
        if not self._folder.is_dir():
            return ()
        return tuple(sorted(entry.name for entry in self._folder.iterdir() if _whole(entry)))

    def get(self, name: str) -> str | None:
        try:
            return (self._folder / names.secret_name(name)).read_text()
        except FileNotFoundError:
            return None

    def put(self, name: str, value: str) -> None:
        path = self._folder / names.secret_name(name)
        if "\0" in value or len(value.encode()) > LARGEST:
            raise BadInput(f"a secret is text of at most {LARGEST} bytes, without null characters")
        if value.startswith("file:"):
            # Agents would take it for the path of a file on their own host.
            raise BadInput("a secret cannot begin with `file:`; name that file in the job instead")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Made with mode 0600 and renamed, so nobody ever reads half a secret, or another's.
        handle, draft = tempfile.mkstemp(dir=self._folder, prefix=".draft-")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(value)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise

    def drop(self, name: str) -> None:
        try:
            (self._folder / names.secret_name(name)).unlink()
        except FileNotFoundError:
            near = names.nearest(name, self.names())
            raise NotFound(f"no secret is called {name!r}{near}") from None


def _whole(entry: Path) -> bool:
    return not entry.name.startswith(".") and entry.is_file()

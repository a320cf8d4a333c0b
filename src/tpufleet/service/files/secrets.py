"""Secrets: one file each that only the server's user can read. Never in the database or a log.

Each person has their own, which no job of another person gets; others are everybody's.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from tpufleet.errors import BadInput, NotFound
from tpufleet.service import identifiers as names

_OWN = ".own"  # folder of folders, one a person; no secret can have this name
MAX_SECRET_BYTES = 64 * 1024  # it becomes an environment variable


class SecretFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self, owner: str | None = None) -> tuple[str, ...]:
        """A person's own; of None, everybody's."""
        folder = self._of(owner)
        if not folder.is_dir():
            return ()
        return tuple(sorted(entry.name for entry in folder.iterdir() if _whole(entry)))

    def get(self, name: str, owner: str) -> str | None:
        """What a job of this person gets: their own, else everybody's."""
        for folder in (self._of(owner), self._folder):
            try:
                return (folder / names.check_secret_name(name)).read_text()
            except FileNotFoundError:
                continue
        return None

    def put(self, name: str, value: str, owner: str | None = None) -> None:
        folder = self._of(owner)
        path = folder / names.check_secret_name(name)
        if "\0" in value or len(value.encode()) > MAX_SECRET_BYTES:
            raise BadInput(
                f"a secret is text of at most {MAX_SECRET_BYTES} bytes, without null characters"
            )
        if value.startswith("file:"):
            # Agents would take it for the path of a file on their own host.
            raise BadInput("a secret cannot begin with `file:`; name that file in the job instead")
        for each in (self._folder, self._folder / _OWN, folder):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Made with mode 0600 and renamed, so nobody ever reads half a secret, or another's.
        handle, draft = tempfile.mkstemp(dir=folder, prefix=".draft-")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(value)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise

    def delete(self, name: str, owner: str | None = None) -> None:
        try:
            (self._of(owner) / names.check_secret_name(name)).unlink()
        except FileNotFoundError:
            whose = "shared secret" if owner is None else "secret of yours"
            near = names.suggestion(name, self.names(owner))
            raise NotFound(f"no {whose} is called {name!r}{near}") from None

    def delete_all(self, owner: str) -> None:
        """All that were theirs: whoever gets this name next must not have them."""
        folder = self._of(owner)
        if folder.is_dir():
            shutil.rmtree(folder)

    def _of(self, owner: str | None) -> Path:
        return self._folder if owner is None else self._folder / _OWN / names.check_user_name(owner)


def _whole(entry: Path) -> bool:
    return not entry.name.startswith(".") and entry.is_file()

"""Secrets: one file each, readable by the server's user only. Never in the database or a log.

A user's own secrets are only given to their jobs; shared secrets to all jobs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from tpufleet.errors import BadInput, NotFound
from tpufleet.service import identifiers, redaction

_OWN = ".own"  # one folder per user; not a valid secret name
MAX_SECRET_BYTES = 64 * 1024  # it becomes an environment variable


class SecretFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self, owner: str | None = None) -> tuple[str, ...]:
        """Of a user; None: the shared ones."""
        folder = self._folder_of(owner)
        if not folder.is_dir():
            return ()
        return tuple(sorted(entry.name for entry in folder.iterdir() if _is_secret(entry)))

    def get(self, name: str, owner: str) -> str | None:
        """The value for a job of this user: their own secret, else the shared one."""
        for folder in (self._folder_of(owner), self._folder):
            try:
                value = (folder / identifiers.check_secret_name(name)).read_text()
            except FileNotFoundError:
                continue
            redaction.remember(value)
            return value
        return None

    def put(self, name: str, value: str, owner: str | None = None) -> None:
        folder = self._folder_of(owner)
        path = folder / identifiers.check_secret_name(name)
        redaction.remember(value)
        if "\0" in value or len(value.encode()) > MAX_SECRET_BYTES:
            raise BadInput(
                f"value: must be text of at most {MAX_SECRET_BYTES} bytes, without null characters"
            )
        if value.startswith("file:"):
            # Agents would read it as the path of a file on their host.
            raise BadInput(
                "value: must not start with `file:`; put the file reference in the job file instead"
            )
        for each in (self._folder, self._folder / _OWN, folder):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Created with mode 0600 and renamed, so that a reader never sees a partial secret.
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
            (self._folder_of(owner) / identifiers.check_secret_name(name)).unlink()
        except FileNotFoundError:
            kind = "shared secret" if owner is None else "secret"
            near = identifiers.suggestion(name, self.names(owner))
            raise NotFound(f"no {kind} named {name!r}{near}") from None

    def delete_all(self, owner: str) -> None:
        """So that a later user of the same name does not get them."""
        folder = self._folder_of(owner)
        if folder.is_dir():
            shutil.rmtree(folder)

    def _folder_of(self, owner: str | None) -> Path:
        return (
            self._folder
            if owner is None
            else self._folder / _OWN / identifiers.check_user_name(owner)
        )


def _is_secret(entry: Path) -> bool:
    return not entry.name.startswith(".") and entry.is_file()

"""Errors answer two questions: would a retry help, and what should the reader do?

`Temporary` and `Permanent` answer the first; the message answers the second. `install_command` is
that answer when a package is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence


class FleetError(Exception):
    """Base of every error that tpufleet raises deliberately."""


class Temporary:
    """A later retry may succeed."""


class Permanent:
    """A retry of the same request will fail the same way; something must change first."""


class BadInput(FleetError, Permanent):
    """Invalid input. The message names the field, the error and the nearest valid value."""


class InvalidSettings(BadInput):
    """Several errors of one document: where, and what is wrong there."""

    def __init__(self, errors: Sequence[tuple[str, str]] | str) -> None:
        """A client has only the message of an error of the server."""
        self.errors = () if isinstance(errors, str) else tuple(errors)
        lines = "\n".join(f"{path}: {problem}" for path, problem in self.errors)
        super().__init__(errors if isinstance(errors, str) else lines)


class NotFound(FleetError, Permanent):
    """The object does not exist. The message says what exists."""


class Conflict(FleetError, Permanent):
    """The request contradicts the stored state."""


class Forbidden(FleetError, Permanent):
    """The caller is authenticated, but lacks the role."""


class Unauthorized(FleetError, Permanent):
    """The caller is not authenticated: no token, or an invalid one."""


class Fenced(FleetError, Permanent):
    """Another controller holds the lease now; this one must stop acting."""


class Unreachable(FleetError, Temporary):
    """The server or its database does not respond."""


class NoConnection(Unreachable):
    """No server accepts connections at the address."""


class UntrustedCertificate(Unreachable):
    """The certificate of the server is of an unknown CA, or for another name."""


class NoAnswer(Unreachable):
    """The server accepts connections but does not answer in time."""


class DatabaseUnreachable(Unreachable):
    """The database of the server does not respond. Its store logs that."""


class StorageFull(Unreachable):
    """The disk of the server or its database is full. Nothing was accepted."""


class DatabaseFull(StorageFull):
    """The disk of the database server is full, not that of the server."""


class StorageUnusable(Unreachable):
    """The database of the server is read-only, damaged or gone. Nothing was accepted, and an
    operator has to act."""


class StorageReadOnly(StorageUnusable):
    """The database of the server is read-only."""


class ProviderError(FleetError):
    """A provider rejected a request, or failed."""


class NoCapacity(ProviderError, Temporary):
    """The zone is out of capacity for this type. Wait, or allow another zone."""


class QuotaExceeded(ProviderError, Temporary):
    """The project's quota in this zone is used up. Wait, allow another zone, or raise the quota."""


class RateLimited(ProviderError, Temporary):
    """Too many requests. Retry with backoff."""


class ProviderUnavailable(ProviderError, Temporary):
    """The provider failed in a way that is usually temporary."""


class ProviderBusy(ProviderError, Temporary):
    """Another operation on the resource is in progress. Retry."""


class PermissionMissing(ProviderError, Permanent):
    """The credentials lack a permission. Grant the role that the message names."""


class BadRequest(ProviderError, Permanent):
    """The provider will never accept this request. Change the job or the pool."""


@contextlib.contextmanager
def optional_packages(feature: str, extra: str) -> Iterator[None]:
    """Around imports of what only this extra of tpufleet installs."""
    try:
        yield
    except ImportError as error:
        raise BadInput(
            f"{feature} requires the package {error.name}\n"
            f"  next: {install_command(f'tpufleet[{extra}]')}"
        ) from error


def install_command(requirement: str) -> str:
    """The line that installs a package, such as `tpufleet[gcs]`, for the Python that runs this,
    which need not be the one of the shell: with what its environment was made with."""
    import importlib.util
    import os
    import shlex
    import shutil
    import sys

    package, python = shlex.quote(requirement), shlex.quote(sys.executable)
    if os.path.exists(os.path.join(sys.prefix, "uv-receipt.toml")):
        return f"uv tool install {package}"
    if os.path.exists(os.path.join(sys.prefix, "pipx_metadata.json")):
        return f"pipx install --force {package}"
    if importlib.util.find_spec("pip") is not None:
        return f"{python} -m pip install {package}"
    if shutil.which("uv") is not None:  # its environments have no pip
        return f"uv pip install --python {python} {package}"
    return f"{python} -m ensurepip && {python} -m pip install {package}"

"""Errors answer two questions: would a retry help, and what should the reader do?

`Temporary` and `Permanent` answer the first; the message answers the second. `install_command` is
that answer when a package is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

MOST_NAMES = 40  # in one message
ASK_ADMINISTRATOR = "ask the administrator of your organisation"
LOG_IN = (
    "no valid credentials: run `gcloud auth application-default login`, or use a service account"
)


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
    """The zone is out of capacity for this type. Wait, or allow another zone. `until`: when that is
    known to change."""

    def __init__(self, message: str = "", *, until: datetime | None = None) -> None:
        super().__init__(message)
        self.until = until


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


# Conditions that are noticed in many places, each in the same words.


def invalid(value: object, expected: str, example: str, field: str = "") -> BadInput:
    """A value of another form. `expected` says what it should be, with its article."""
    return BadInput(f"{_of(field)}{quote(value)} is not {expected}; for example {example}")


def must_be(expected: str, value: object, field: str = "") -> BadInput:
    """A value that is not in range, or of another kind. `expected`: `from 1 to 5`, `text`."""
    return BadInput(f"{_of(field)}must be {expected}, not {quote(value)}")


def unknown(kind: str, name: object, known: Iterable[str], field: str = "") -> BadInput:
    """A name of which there is none."""
    near = suggest(name if isinstance(name, str) else "", known)
    return BadInput(f"{_of(field)}unknown {kind} {quote(name)}{near}")


def unreadable(path: object, reason: object, field: str = "", hint: str = "") -> BadInput:
    """A file that cannot be read, because of an exception or another reason."""
    if isinstance(reason, OSError):
        reason = reason.strerror or reason
    elif isinstance(reason, UnicodeDecodeError):
        reason = "not text"
    return BadInput(f"{_of(field)}cannot read {path}: {reason}{hint and '; '}{hint}")


def readable_by_others(path: object, field: str = "") -> BadInput:
    """A file with a secret whose mode is too wide."""
    return BadInput(
        f"{_of(field)}{path} can be read by other users; run `chmod 600 {path}`, and if others "
        "have access to this machine, replace what it contains"
    )


def missing(path: object) -> NotFound:
    return NotFound(f"{path} does not exist")


def not_found(kind: str, name: object, command: str, known: Iterable[str] = ()) -> NotFound:
    """`command` lists those that exist."""
    near = _nearest(str(name), list(known), {}, cutoff=0.5)
    meant = f"; did you mean {near}?" if near else ""
    return NotFound(f"no {kind} named {quote(name)}{meant}; list them with `tpu {command}`")


def exists(path: object, next_step: str) -> Conflict:
    return Conflict(f"{path} exists\n  next: {next_step}")


def together(first: str, second: str) -> str:
    """Of two settings or options of which only one was set."""
    return f"set both {first} and {second}, or neither"


def one_of(first: str, second: str) -> BadInput:
    return BadInput(f"pass either {first} or {second}, not both")


def too_long(most: int, unit: str = "characters", field: str = "") -> BadInput:
    return BadInput(f"{_of(field)}must be text of at most {most} {unit}, without null characters")


def no_such_host(of: str, count: int, host: object) -> BadInput:
    return BadInput(f"{of} has hosts 0 to {count - 1}, not {host}")


def unwritable(path: object, error: object) -> BadInput:
    return BadInput(f"cannot write {path}: {getattr(error, 'strerror', None) or error}")


def unexpected(activity: str) -> str:
    """Of a loop that continues after an exception, which the log has."""
    return f"unexpected error while {activity}; continuing"


def cannot_listen(address: str, error: Exception) -> BadInput:
    reason = getattr(error, "strerror", None) or error
    return BadInput(f"cannot listen on {address}: {reason}; choose another address")


def not_available(kind: str, where: str, provider: str) -> str:
    """Of a TPU type that a provider lacks, and another has."""
    return f"{kind} is not available {where}; use the provider {provider}"


def not_installed(package: str, requirement: str) -> BadInput:
    return BadInput(f"{package} is not installed\n  next: {install_command(requirement)}")


def not_yaml(source: object, line: str, problem: object) -> BadInput:
    return BadInput(f"{source}: {line}not valid YAML: {str(problem).splitlines()[0]}")


def no_project(option: str = "--project") -> BadInput:
    return BadInput(
        f"no Google Cloud project\n  next: pass {option}, or run `tpu init`, which sets tpu_vm"
    )


def not_allowed(field: str, name: object, allowed: Iterable[str]) -> BadInput:
    """What the settings of the server leave out."""
    named = ", ".join(allowed)
    return BadInput(f"{field}: {name} is not allowed on this server; allowed: {named}")


def no_value(of: str, example: str) -> BadInput:
    return BadInput(f"{of}: no value; write {example}")


def no_credentials(of: str, error: object) -> PermissionMissing:
    """For Google Cloud."""
    return PermissionMissing(f"{of}: {LOG_IN}: {str(error).rstrip('.')}")


def unreachable(service: str, error: object) -> str:
    return f"{service} is unreachable: {error}"


def busy(what: str) -> str:
    """Of work that is done once at a time."""
    return f"another {what} is running; retry when it has finished"


def _of(field: str) -> str:
    return f"{field}: " if field else ""


def quote(value: Any) -> str:
    """A value in a message: short and on one line, whatever it is."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "…")
    if value is None or isinstance(value, bool | float):
        return str(value).lower()
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else "a number of more than 64 bits"
    kinds: dict[type, str] = {list: "a list", tuple: "a list", dict: "a mapping"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def suggest(
    name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None, cutoff: float = 0.6
) -> str:
    """`; did you mean …?`, or the valid names, or nothing if there are none."""
    known = list(known)
    if near := _nearest(name, known, aliases or {}, cutoff):
        return f"; did you mean {near}?"
    more = ", …" if len(known) > MOST_NAMES else ""
    return f"; write one of {', '.join(known[:MOST_NAMES])}{more}" if known else ""


def _nearest(name: str, known: Sequence[str], aliases: Mapping[str, str], cutoff: float) -> str:
    import difflib

    if (alias := aliases.get(name.lower())) in known:
        return alias or ""
    folded = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name[:60].lower(), folded, n=1, cutoff=cutoff)
    return folded[close[0]] if close else ""


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

"""Settings: read once from the environment and the config file, then passed down as arguments.

An environment variable wins over the file; an option on the command line wins over both.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tpufleet.errors import BadInput, Unauthorized

DEFAULT_SNAPSHOT_LIMIT = 100 * 2**20
KEYS = (
    "server",
    "token_file",
    "store",
    "data",
    "provider",
    "listen",
    "public_url",
    "snapshot_limit",
    "slices_per_user",
    "bucket",
    "tpu_vm",
    "gke",
    "prices",
)
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    home: Path  # the state folder of this server or this user
    config_file: Path
    server: str | None = None  # None: the embedded one, where it runs
    token_file: Path | None = None  # None: the state folder's, for a server on this machine
    store: str | None = None  # URL; None: SQLite in the state folder
    provider: str = "local"  # where slices come from when a job does not say
    listen: str = "127.0.0.1:0"  # where `tpu serve` listens; port 0: any that is free
    public_url: str | None = None  # where agents call; None: this very server
    snapshot_limit: int = DEFAULT_SNAPSHOT_LIMIT
    slices_per_user: int | None = None  # that one user may hold at a time; None: no limit
    bucket: str | None = None  # gs:// place of checkpoints, code and logs; None: `data`
    tpu_vm: Mapping[str, Any] | None = None  # what `providers.tpu_vm.settings` reads
    gke: Mapping[str, Any] | None = None  # what `providers.gke.settings` reads
    prices: Mapping[str, Any] | None = None  # for one chip hour, by generation and capacity
    shared: Path | None = None  # folder that servers of one store share; None: the state folder

    @property
    def data(self) -> Path:
        """Where what outlives a server is: its secret, code, logs, checkpoints, slices."""
        return self.shared or self.home


def load(environ: Mapping[str, str], user_home: Path) -> Config:
    """The same environment and files give the same settings."""
    base = environ.get("XDG_CONFIG_HOME") or str(user_home / ".config")
    file = Path(environ.get("TPUFLEET_CONFIG") or Path(base) / "tpufleet" / "config.yaml")
    written = _written(file)

    def given(key: str) -> tuple[str, str] | None:
        """The value and where it was found."""
        variable = f"TPUFLEET_{key.upper()}"
        if environ.get(variable):
            return environ[variable], variable
        return (str(written[key]), f"{file}: {key}") if key in written else None

    server, token_file, limit = given("server"), given("token_file"), given("snapshot_limit")
    store, listen, public_url = given("store"), given("listen"), given("public_url")
    data, per_user = given("data"), given("slices_per_user")
    home = environ.get("TPUFLEET_HOME") or "~/.local/share/tpufleet"
    return Config(
        home=_path(home, user_home),
        config_file=file,
        server=check_server_url(*server) if server else None,
        token_file=_path(token_file[0], user_home) if token_file else None,
        store=store[0] if store else None,
        provider=(given("provider") or ("local", ""))[0],
        listen=check_listen_address(*listen) if listen else "127.0.0.1:0",
        public_url=check_server_url(*public_url) if public_url else None,
        snapshot_limit=_amount(*limit) if limit else DEFAULT_SNAPSHOT_LIMIT,
        slices_per_user=_count(*per_user) if per_user else None,
        shared=_path(data[0], user_home) if data else None,
        bucket=_bucket(*bucket) if (bucket := given("bucket")) else None,
        tpu_vm=_mapping("tpu_vm", environ, written, file),
        gke=_with_variables("gke", environ, _mapping("gke", environ, written, file)),
        prices=_mapping("prices", environ, written, file),
    )


def debug_enabled(environ: Mapping[str, str]) -> bool:
    return environ.get("TPUFLEET_DEBUG", "") not in ("", "0")


def embedded_server_url(home: Path) -> str | None:
    """URL of the server that runs on this state folder; None when none does."""
    try:
        said = json.loads((home / "server.json").read_text())
        url, pid = str(said["url"]), int(said["pid"])
        os.kill(pid, 0)
        # Where nobody collects dead processes (some containers), one that ended still has a number.
        status = Path(f"/proc/{pid}/stat")
        if status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z":
            return None
    except (FileNotFoundError, ValueError, KeyError, TypeError, ProcessLookupError, OverflowError):
        return None
    except PermissionError:  # it lives, under another user
        return url
    return url


def read_token(settings: Config, server: str) -> str:
    """The token for this server. The state folder's own is never sent to another machine."""
    if settings.token_file is not None:
        return read_secret_file(settings.token_file)
    if not is_loopback(server):
        raise Unauthorized(
            f"no token for {server}; put it in a file that only you can read (mode 600) and set "
            f"TPUFLEET_TOKEN_FILE, or token_file in {settings.config_file}"
        )
    return read_secret_file(settings.home / "token")


def read_secret_file(path: Path) -> str:
    """What a file of mode 600 holds. Unauthorized when others could read it too."""
    try:
        with open(path) as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise Unauthorized(f"others can read {path}; run `chmod 600 {path}`")
            value = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise Unauthorized(
            f"no token in {path} ({reason}); ask an admin for `tpu token create`"
        ) from error
    if not value or not value.isprintable():
        raise Unauthorized(f"{path} holds no token; ask an admin for `tpu token create`")
    return value


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _path(text: str, user_home: Path) -> Path:
    return Path(os.path.abspath(user_home / text[2:] if text.startswith("~/") else text))


def _written(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    import yaml  # slow to import, and rarely needed

    try:
        written = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
        problem = str(error).splitlines()[0]
        raise BadInput(f"{file}: cannot be read: {problem}; mend it or take it away") from error
    if written is None:
        return {}
    if not isinstance(written, dict):
        raise BadInput(f"{file}: a mapping is needed; write `server: https://…`, say")
    for key in written:
        if key not in KEYS:
            close = difflib.get_close_matches(str(key), KEYS, n=1)
            cure = f"did you mean {close[0]}?" if close else f"write one of {', '.join(KEYS)}"
            raise BadInput(f"{file}: {key}: unknown field; {cure}")
    return {key: value for key, value in written.items() if value is not None}


def _bucket(text: str, source: str) -> str:
    if not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]{1,220}(/[^\s]*)?", text):
        raise BadInput(f"{source}: {text!r} is no place in Cloud Storage; write gs://bucket/folder")
    return text.rstrip("/")


def _mapping(
    key: str, environ: Mapping[str, str], written: Mapping[str, Any], file: Path
) -> Mapping[str, Any] | None:
    """A setting that has settings of its own; in the environment it is written as JSON."""
    source, found = f"{file}: {key}", written.get(key)
    variable = f"TPUFLEET_{key.upper()}"
    if environ.get(variable):
        source = variable
        try:
            found = json.loads(environ[variable])
        except ValueError as error:
            raise BadInput(f"{source}: not JSON: {error}") from error
    if found is not None and not isinstance(found, dict):
        raise BadInput(f"{source}: a mapping is needed, one `name: value` a line")
    return found


def _with_variables(
    key: str, environ: Mapping[str, str], found: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Fields of a mapping that have a variable of their own, TPUFLEET_KEY_FIELD. It wins."""
    prefix = f"TPUFLEET_{key.upper()}_"
    single = {
        name.removeprefix(prefix).lower(): value.strip()
        for name, value in environ.items()
        if name.startswith(prefix) and value.strip()
    }
    return {**(found or {}), **single} if single else found


def check_server_url(text: str, source: str) -> str:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise BadInput(f"{source}: {text!r} is not a server; write https://host:port")
    return text.rstrip("/")


def check_listen_address(text: str, source: str) -> str:
    if not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s]+):[0-9]{1,5}", text):
        raise BadInput(f"{source}: {text!r} is not an address; write 127.0.0.1:8470")
    return text


def _count(text: str, source: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or int(text) < 1:
        raise BadInput(f"{source}: {text!r} is not a number of slices; write 8, say")
    return int(text)


def _amount(text: str, source: str) -> int:
    match = re.fullmatch(r"([0-9]{1,15})\s*([kmg]?)(i?b)?", text.strip().lower())
    if match is None:
        raise BadInput(f"{source}: {text!r} is not an amount of bytes; write 200M")
    return int(match[1]) * _UNITS[match[2]]

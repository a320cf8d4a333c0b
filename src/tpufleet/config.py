"""Configuration: read once from the environment and the config file, then passed as arguments.

An environment variable overrides the file; a command-line option overrides both.
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
    home: Path  # state folder of this server or user
    config_file: Path
    server: str | None = None  # None: the embedded server
    token_file: Path | None = None  # None: `token` in the state folder, for a local server
    store: str | None = None  # URL; None: SQLite in the state folder
    provider: str = "local"  # for jobs that do not name one
    provider_chosen: bool = False  # set by the operator, not the default
    listen: str = "127.0.0.1:0"  # of `tpu serve`; port 0: any free port
    public_url: str | None = None  # at which agents reach the server; None: its own address
    snapshot_limit: int = DEFAULT_SNAPSHOT_LIMIT
    slices_per_user: int | None = None  # quota per user; None: unlimited
    bucket: str | None = None  # gs:// location for checkpoints, code and logs; None: `data`
    tpu_vm: Mapping[str, Any] | None = None  # parsed by `providers.tpu_vm.settings`
    gke: Mapping[str, Any] | None = None  # parsed by `providers.gke.settings`
    prices: Mapping[str, Any] | None = None  # per chip hour, by generation and capacity
    shared: Path | None = None  # folder shared by servers of one store; None: the state folder

    @property
    def data(self) -> Path:
        """The folder of what survives a server: secret, code, logs, checkpoints, slices."""
        return self.shared or self.home


def load(environ: Mapping[str, str], user_home: Path) -> Config:
    """Deterministic: the same environment and file give the same configuration."""
    base = environ.get("XDG_CONFIG_HOME") or str(user_home / ".config")
    file = Path(environ.get("TPUFLEET_CONFIG") or Path(base) / "tpufleet" / "config.yaml")
    values = _read_file(file)

    def setting(key: str) -> tuple[str, str] | None:
        """The value and its source."""
        variable = f"TPUFLEET_{key.upper()}"
        if environ.get(variable):
            return environ[variable], variable
        return (str(values[key]), f"{file}: {key}") if key in values else None

    server, token_file, limit = setting("server"), setting("token_file"), setting("snapshot_limit")
    store, listen, public_url = setting("store"), setting("listen"), setting("public_url")
    data, per_user = setting("data"), setting("slices_per_user")
    home = environ.get("TPUFLEET_HOME") or "~/.local/share/tpufleet"
    return Config(
        home=_path(home, user_home),
        config_file=file,
        server=check_server_url(*server) if server else None,
        token_file=_path(token_file[0], user_home) if token_file else None,
        store=store[0] if store else None,
        provider=(setting("provider") or ("local", ""))[0],
        provider_chosen=setting("provider") is not None,
        listen=check_listen_address(*listen) if listen else "127.0.0.1:0",
        public_url=check_server_url(*public_url) if public_url else None,
        snapshot_limit=_size(*limit) if limit else DEFAULT_SNAPSHOT_LIMIT,
        slices_per_user=_count(*per_user) if per_user else None,
        shared=_path(data[0], user_home) if data else None,
        bucket=_bucket(*bucket) if (bucket := setting("bucket")) else None,
        tpu_vm=_mapping("tpu_vm", environ, values, file),
        gke=_with_variables("gke", environ, _mapping("gke", environ, values, file)),
        prices=_mapping("prices", environ, values, file),
    )


def debug_enabled(environ: Mapping[str, str]) -> bool:
    return environ.get("TPUFLEET_DEBUG", "") not in ("", "0")


def embedded_server_url(home: Path) -> str | None:
    """URL of the server that runs on this state folder; None when there is none."""
    try:
        record = json.loads((home / "server.json").read_text())
        url, pid = str(record["url"]), int(record["pid"])
        os.kill(pid, 0)
        # In containers without an init process, an exited server remains as a zombie.
        status = Path(f"/proc/{pid}/stat")
        if status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z":
            return None
    except (FileNotFoundError, ValueError, KeyError, TypeError, ProcessLookupError, OverflowError):
        return None
    except PermissionError:  # running as another user
        return url
    return url


def read_token(config: Config, server: str) -> str:
    """The token for this server. The token in the state folder is never sent to another machine."""
    if config.token_file is not None:
        return read_secret_file(config.token_file)
    if not is_loopback(server):
        raise Unauthorized(
            f"no token for {server}; save it in a file with mode 600 and set TPUFLEET_TOKEN_FILE "
            f"to its path, or set token_file in {config.config_file}"
        )
    return read_secret_file(config.home / "token")


def read_secret_file(path: Path) -> str:
    """The content of a file with mode 600. Raises Unauthorized when others can read it."""
    try:
        with open(path) as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise Unauthorized(f"{path} is readable by others; run `chmod 600 {path}`")
            value = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise Unauthorized(
            f"cannot read a token from {path} ({reason}); ask an admin to run `tpu token create`"
        ) from error
    if not value or not value.isprintable():
        raise Unauthorized(f"{path} contains no token; ask an admin to run `tpu token create`")
    return value


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _path(text: str, user_home: Path) -> Path:
    return Path(os.path.abspath(user_home / text[2:] if text.startswith("~/") else text))


def _read_file(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    import yaml  # slow to import and rarely needed

    try:
        values = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
        problem = str(error).splitlines()[0]
        raise BadInput(f"{file}: cannot be read: {problem}; fix or delete the file") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise BadInput(f"{file}: must be a mapping, such as `server: https://fleet.example:8470`")
    for key in values:
        if key not in KEYS:
            close = difflib.get_close_matches(str(key), KEYS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known fields: {', '.join(KEYS)}"
            raise BadInput(f"{file}: {key}: unknown field; {hint}")
    return {key: value for key, value in values.items() if value is not None}


def _bucket(text: str, source: str) -> str:
    if not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]{1,220}(/[^\s]*)?", text):
        raise BadInput(
            f"{source}: {text!r} is not a Cloud Storage location; use gs://bucket/folder"
        )
    return text.rstrip("/")


def _mapping(
    key: str, environ: Mapping[str, str], values: Mapping[str, Any], file: Path
) -> Mapping[str, Any] | None:
    """A nested setting; JSON in the environment."""
    source, value = f"{file}: {key}", values.get(key)
    variable = f"TPUFLEET_{key.upper()}"
    if environ.get(variable):
        source = variable
        try:
            value = json.loads(environ[variable])
        except ValueError as error:
            raise BadInput(f"{source}: not JSON: {error}") from error
    if value is not None and not isinstance(value, dict):
        raise BadInput(f"{source}: must be a mapping of names to values")
    return value


def _with_variables(
    key: str, environ: Mapping[str, str], mapping: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Merge in variables of single fields, TPUFLEET_KEY_FIELD, which take precedence."""
    prefix = f"TPUFLEET_{key.upper()}_"
    fields = {
        name.removeprefix(prefix).lower(): value.strip()
        for name, value in environ.items()
        if name.startswith(prefix) and value.strip()
    }
    return {**(mapping or {}), **fields} if fields else mapping


def check_server_url(text: str, source: str) -> str:
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise BadInput(f"{source}: {text!r} is not a server URL; use https://host:port")
    return text.rstrip("/")


def check_listen_address(text: str, source: str) -> str:
    if not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s]+):[0-9]{1,5}", text):
        raise BadInput(
            f"{source}: {text!r} is not an address; use host:port, such as 127.0.0.1:8470"
        )
    return text


def _count(text: str, source: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or int(text) < 1:
        raise BadInput(
            f"{source}: {text!r} is not a number of slices; use a whole number of at least 1"
        )
    return int(text)


def _size(text: str, source: str) -> int:
    match = re.fullmatch(r"([0-9]{1,15})\s*([kmg]?)(i?b)?", text.strip().lower())
    if match is None:
        raise BadInput(
            f"{source}: {text!r} is not a size in bytes; use a number with k, M or G, such as 200M"
        )
    return int(match[1]) * _UNITS[match[2]]

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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from tpufleet.errors import BadInput, InvalidSettings, Unauthorized
from tpufleet.model.values import byte_sizes, durations, store_urls

T = TypeVar("T")
D = TypeVar("D")

DEFAULT_SNAPSHOT_LIMIT = 100 * 2**20
DEFAULT_LOG_LIMIT = 2**30
DEFAULT_TOKENS_PER_USER = 100
# Each is a few processes of the server's machine. 64 is one v5e-256.
DEFAULT_LOCAL_HOSTS = 64
KEYS = (
    "server",
    "token_file",
    "store",
    "data",
    "secret_file",
    "admin_token_file",
    "provider",
    "providers",
    "listen",
    "public_url",
    "tls_cert",
    "tls_key",
    "ca_file",
    "request_timeout",
    "insecure_http",
    "snapshot_limit",
    "log_limit",
    "log_format",
    "retention",
    "secrets_kms_key",
    "secrets_age_identity",
    "local_user",
    "local_containers",
    "local_env",
    "local_hosts",
    "slices_per_user",
    "tokens_per_user",
    "fair_share_half_life",
    "max_hosts_lost_percent",
    "bucket",
    "tpu_vm",
    "gke",
    "prices",
    "budgets",
    "notifications",
)
SECTIONS = ("tpu_vm", "gke", "retention", "prices", "budgets", "notifications")  # of settings
_OTHER_VARIABLES = ("CONFIG", "HOME", "DEBUG", "TPU_VM_ENDPOINT")
_MISSPELT = 0.85  # least similarity; none of our other variables is as near to a setting
LOG_FORMATS = ("text", "json")
PROVIDERS = ("local", "tpu-vm", "gke")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    home: Path  # state folder of this server or user
    config_file: Path
    server: str | None = None  # None: the embedded server
    token_file: Path | None = None  # None: `token` in the state folder, for a local server
    store: str | None = None  # URL; None: SQLite in the state folder
    provider: str | None = None  # for jobs that do not name one; None: the first enabled one
    providers: tuple[str, ...] | None = None  # None: see `enabled_providers`
    listen: str = "127.0.0.1:0"  # of `tpu serve`; port 0: any free port
    public_url: str | None = None  # at which agents reach the server; None: its own address
    tls_cert: Path | None = None  # certificate chain of the server, PEM; None: plain HTTP
    tls_key: Path | None = None  # its private key, PEM
    ca_file: Path | None = None  # CAs that clients and agents trust besides the system's
    request_timeout: timedelta | None = None  # of a client's requests; None: 30 s
    insecure_http: bool = False  # plain HTTP may be reached from other machines
    snapshot_limit: int = DEFAULT_SNAPSHOT_LIMIT
    log_limit: int = DEFAULT_LOG_LIMIT  # bytes of all logs of a job
    log_format: str = "text"  # of the server's own log: `text` or `json`
    retention: Mapping[str, Any] | None = None  # parsed by `model.retention_rules`
    secrets_kms_key: str | None = None  # Cloud KMS key that wraps the key of secrets
    secrets_age_identity: Path | None = None  # file of an age identity that wraps it instead
    local_user: str | None = None  # of all jobs on `local`, if the server runs as root; None: auto
    local_containers: bool = False  # jobs on `local` may use images, with this machine's Docker
    local_env: tuple[str, ...] = ()  # variables of the server that jobs on `local` inherit
    local_hosts: int = DEFAULT_LOCAL_HOSTS  # simulated hosts at a time, of all jobs on `local`
    tokens_per_user: int = DEFAULT_TOKENS_PER_USER  # that are valid; without browser sessions
    slices_per_user: int | None = None  # quota per user; None: unlimited
    fair_share_half_life: timedelta | None = timedelta(days=7)  # of usage; None: no fair share
    max_hosts_lost_percent: int = 20  # per minute, by missing heartbeats alone
    bucket: str | None = None  # gs:// location for checkpoints, code and logs; None: `data`
    tpu_vm: Mapping[str, Any] | None = None  # parsed by `providers.tpu_vm.settings`
    gke: Mapping[str, Any] | None = None  # parsed by `providers.gke.settings`
    prices: Mapping[str, Any] | None = None  # per chip hour, by generation and capacity
    budgets: Mapping[str, Any] | None = None  # parsed by `model.budgets`
    notifications: Mapping[str, Any] | None = None  # parsed by `model.notifications`
    secret_file: Path | None = None  # tokens of slices derive from it; None: `secret` in `data`
    admin_token_file: Path | None = None  # token of the user `admin`; None: see `token_file`
    shared: Path | None = None  # folder shared by servers of one store; None: the state folder

    @property
    def data(self) -> Path:
        """The folder of what survives a server: secret, code, logs, checkpoints, slices."""
        return self.shared or self.home

    @property
    def store_url(self) -> str:
        return self.store or f"sqlite:///{self.home / 'fleet.db'}"

    @property
    def shares_files(self) -> bool:
        """Whether servers on other machines read and write the same code, logs and secrets, through
        the bucket and the database: each has a disk of its own."""
        shared_database = (self.store or "").startswith(("postgresql:", "postgres:"))
        return self.bucket is not None and shared_database and self.shared is None

    @property
    def enabled_providers(self) -> tuple[str, ...]:
        """The providers that jobs may use. Jobs on `local` run on the server's own machine, so it
        must be listed on a server that others can reach or that has another provider."""
        if self.providers is not None:
            return self.providers
        remote = tuple(
            name for name, settings in (("tpu-vm", self.tpu_vm), ("gke", self.gke))
            if settings is not None
        )  # fmt: skip
        if remote:
            return remote
        return () if self.exposed else ("local",)

    @property
    def exposed(self) -> bool:
        """Whether other machines can reach the server."""
        addresses = [f"http://{self.listen}", *([self.public_url] if self.public_url else [])]
        return not all(is_loopback(address) for address in addresses)

    def check_transport(self) -> None:
        """Raises BadInput when tokens and secrets would cross a network without encryption."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise BadInput("tls_cert and tls_key: set both, or neither for plain HTTP")
        for path in (self.tls_cert, self.tls_key, self.ca_file):
            if path is not None and not path.is_file():
                raise BadInput(f"{path}: no such file; it is named by a TLS setting")
        if self.tls_key is not None and self.tls_key.stat().st_mode & 0o007:
            raise BadInput(
                f"tls_key: {self.tls_key} can be read by everyone; run `chmod 600 {self.tls_key}`"
            )
        reachable = not is_loopback(f"http://{self.listen}")
        if reachable and self.tls_cert is None and not self.insecure_http:
            raise BadInput(
                f"listen: {self.listen} can be reached from other machines, which would send "
                "tokens and secrets over plain HTTP\n"
                "  next: pass --tls-cert and --tls-key; or listen on 127.0.0.1 behind a proxy "
                "with TLS; or pass --insecure-http on a network that you trust"
            )

    @property
    def default_provider(self) -> str:
        """Raises BadInput unless it is enabled."""
        enabled = self.enabled_providers
        if not enabled:
            raise BadInput(
                f"no provider is enabled: {self.listen} can be reached from other machines, so "
                "`local`, whose jobs run on this machine, is off by default\n"
                f"  next: set tpu_vm or gke in {self.config_file}, or enable `local` for users "
                "that you trust with this machine: TPUFLEET_PROVIDERS=local"
            )
        default = self.provider or enabled[0]
        if default not in enabled:
            hint = {"tpu-vm": "set tpu_vm", "gke": "set gke"}.get(default, "add it to providers")
            raise BadInput(
                f"provider: {default!r} is not enabled on this server; enabled: "
                f"{', '.join(enabled)}\n  next: {hint} in {self.config_file}"
            )
        return default


def load(
    environ: Mapping[str, str],
    user_home: Path,
    *,
    serve: bool = False,
    enable: Sequence[str] = (),
    tls_options: bool = False,
) -> Config:
    """Deterministic: the same environment and file give the same configuration. All errors are
    reported at once. `serve`: the sections of the providers must be complete, of those that are
    enabled or, if `enable` names any, of these; and a certificate needs a key, unless
    `tls_options`: one of them may be named on the command line."""
    config, errors = load_valid(
        environ, user_home, serve=serve, enable=enable, tls_options=tls_options
    )
    if errors:
        raise BadInput("\n".join(errors))
    return config


def load_valid(
    environ: Mapping[str, str],
    user_home: Path,
    *,
    serve: bool = False,
    enable: Sequence[str] = (),
    tls_options: bool = False,
) -> tuple[Config, list[str]]:
    """The valid settings, with defaults in place of invalid ones; and all errors."""
    base = environ.get("XDG_CONFIG_HOME") or str(user_home / ".config")
    file = Path(environ.get("TPUFLEET_CONFIG") or Path(base) / "tpufleet" / "config.yaml")
    values, errors = _read_file(file)

    def checked(parse: Callable[[], T], default: D) -> T | D:
        try:
            return parse()
        except BadInput as error:
            errors.append(str(error))
            return default

    def read(key: str, parse: Callable[[str, str], T], default: D) -> T | D:
        """`parse` is called with the value and its source."""
        variable = f"TPUFLEET_{key.upper()}"
        if environ.get(variable):
            return checked(lambda: parse(environ[variable], variable), default)
        if key in values:
            return checked(lambda: parse(str(values[key]), f"{file}: {key}"), default)
        return default

    def mapping(key: str) -> Mapping[str, Any] | None:
        return checked(lambda: _mapping(key, environ, values, file), None)

    def path(key: str) -> Path | None:
        written = values.get(key)
        if not environ.get(f"TPUFLEET_{key.upper()}") and not isinstance(written, str | None):
            errors.append(f"{file}: {key}: {written!r} is not a path; write /path/to/file")
            return None
        return read(key, lambda text, source: _path(text, user_home), None)

    def plain(text: str, source: str) -> str:
        return text

    config = Config(
        home=_path(environ.get("TPUFLEET_HOME") or "~/.local/share/tpufleet", user_home),
        config_file=file,
        server=read("server", check_server_url, None),
        token_file=path("token_file"),
        store=read("store", _store, None),
        provider=read("provider", _provider, None),
        providers=checked(lambda: _providers(environ, values, file), None),
        listen=read("listen", check_listen_address, "127.0.0.1:0"),
        public_url=read("public_url", check_server_url, None),
        tls_cert=path("tls_cert"),
        tls_key=path("tls_key"),
        ca_file=path("ca_file"),
        request_timeout=read("request_timeout", _timeout, None),
        insecure_http=read("insecure_http", _flag, False),
        snapshot_limit=read("snapshot_limit", _size, DEFAULT_SNAPSHOT_LIMIT),
        log_limit=read("log_limit", _size, DEFAULT_LOG_LIMIT),
        log_format=read("log_format", _log_format, "text"),
        slices_per_user=read("slices_per_user", _count_of("slices"), None),
        local_hosts=read("local_hosts", _count_of("hosts"), DEFAULT_LOCAL_HOSTS),
        tokens_per_user=read("tokens_per_user", _count_of("tokens"), DEFAULT_TOKENS_PER_USER),
        fair_share_half_life=read("fair_share_half_life", _half_life, timedelta(days=7)),
        max_hosts_lost_percent=read("max_hosts_lost_percent", _percent, 20),
        shared=path("data"),
        secret_file=path("secret_file"),
        admin_token_file=path("admin_token_file"),
        bucket=read("bucket", _bucket, None),
        tpu_vm=_tpu_vm(environ, mapping("tpu_vm")),
        gke=_with_variables("gke", environ, mapping("gke")),
        secrets_kms_key=read("secrets_kms_key", _kms_key, None),
        secrets_age_identity=path("secrets_age_identity"),
        local_user=read("local_user", plain, None),
        local_containers=read("local_containers", _flag, False),
        local_env=_names("local_env", environ, values, file)[0],
        retention=mapping("retention"),
        prices=mapping("prices"),
        budgets=mapping("budgets"),
        notifications=mapping("notifications"),
    )
    if serve and not tls_options and (config.tls_cert is None) != (config.tls_key is None):
        named, missing = ("tls_cert", "tls_key") if config.tls_cert else ("tls_key", "tls_cert")
        if not any(f"{missing}: " in error for error in errors):
            source = _source_of(named, config, environ)
            errors.append(f"{source}: {named}: requires {missing}; set both, or neither")
    complete = frozenset((enable or config.enabled_providers) if serve else ())
    invalid: dict[str, Any] = {}
    for section in SECTIONS:
        if problems := _section_errors(section, config, complete, environ):
            errors += problems
            invalid[section] = None
    return replace(config, **invalid), errors


def _section_errors(
    section: str, config: Config, complete: Collection[str], environ: Mapping[str, str]
) -> list[str]:
    """Parsed again where it is used, by the same function."""
    document = getattr(config, section)
    if document is None:
        return []
    parse, example = _section_parser(section)
    try:
        parse(document if section.replace("_", "-") in complete else {**example, **document})
    except InvalidSettings as error:
        return [
            f"{_source_of(path, config, environ)}: {path}: {rest}" for path, rest in error.errors
        ]
    return []


def _section_parser(
    section: str,
) -> tuple[Callable[[Mapping[str, Any]], object], Mapping[str, Any]]:
    """And examples of the fields without which it raises. Imported when the section is used: most
    commands run without one."""
    match section:
        case "tpu_vm":
            from tpufleet.providers.tpu_vm import settings as tpu_vm

            return tpu_vm.parse, tpu_vm.REQUIRED_EXAMPLE
        case "gke":
            from tpufleet.providers.gke import settings as gke

            return gke.parse, gke.REQUIRED_EXAMPLE
        case "retention":
            from tpufleet.model.people import retention_rules

            return retention_rules.parse, {}
        case "prices":
            from tpufleet.model.tpu import prices

            return prices.price_table, {}
        case "budgets":
            from tpufleet.model.people import budgets

            return budgets.parse, {}
        case "notifications":
            from tpufleet.model.people import notifications

            return notifications.parse_rules, {}
    raise AssertionError(section)


def _source_of(path: str, config: Config, environ: Mapping[str, str]) -> str:
    """The variable of the section or of one of its fields, else the config file."""
    section, _, rest = path.partition(".")
    field = rest.partition(".")[0]
    for name in (f"{section}_{field}", section):
        if environ.get(variable := f"TPUFLEET_{name.upper()}"):
            return variable
    return str(config.config_file)


def misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """Warnings about variables that nothing reads and that are spelt nearly like one of ours. Jobs,
    agents and tests have other variables with this prefix."""
    known = [*(key.upper() for key in KEYS), *_OTHER_VARIABLES]
    warnings = []
    for variable in sorted(environ):
        name = variable.removeprefix("TPUFLEET_")
        if name == variable or name in known or name.startswith("GKE_") or not environ[variable]:
            continue
        if close := difflib.get_close_matches(name.upper(), known, n=1, cutoff=_MISSPELT):
            warnings.append(f"{variable}: unknown variable; did you mean TPUFLEET_{close[0]}?")
    return warnings


def origin(config: Config, key: str, environ: Mapping[str, str]) -> str:
    """Where the value of a setting comes from: a variable, the config file, or the default."""
    variable = f"TPUFLEET_{key.upper()}"
    if environ.get(variable):
        return variable
    return str(config.config_file) if key in _read_file(config.config_file)[0] else "default"


def debug_enabled(environ: Mapping[str, str]) -> bool:
    return environ.get("TPUFLEET_DEBUG", "") not in ("", "0")


def embedded_server_url(home: Path) -> str | None:
    """URL of the server that runs on this state folder; None when there is none."""
    record = _embedded_server(home)
    return None if record is None else record[0]


def embedded_certificate(home: Path, url: str) -> Path | None:
    """The certificate of the server that runs on this state folder, if `url` is its address. Only
    we can write the record, so the names in the certificate need not match the address."""
    record = _embedded_server(home)
    return record[1] if record is not None and record[0] == url else None


def redacted_store(url: str) -> str:
    """The URL of a store without its passwords, for people and logs. Not with `urlsplit`: Postgres
    accepts `#` and `?` in a password."""
    url = re.sub(r"^(\w+://[^:@/]*):[^/]*@", r"\1:***@", url)
    start, mark, query = url.partition("?")
    fields = []
    for each in query.split("&"):
        name, equals, _ = each.partition("=")
        private = re.search("password|secret", unquote(name), re.IGNORECASE)
        fields.append(f"{name}{equals}***" if private and equals else each)
    return start + mark + "&".join(fields)


def embedded_data_folder(home: Path) -> Path | None:
    """The data folder of the server that runs on this state folder, whatever is configured now."""
    try:
        return Path(json.loads((home / "server.json").read_text())["data"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _embedded_server(home: Path) -> tuple[str, Path | None] | None:
    try:
        record = json.loads((home / "server.json").read_text())
        certificate = Path(record["certificate"]) if record.get("certificate") else None
        url, pid = str(record["url"]), int(record["pid"])
        os.kill(pid, 0)
        # In containers without an init process, an exited server remains as a zombie.
        status = Path(f"/proc/{pid}/stat")
        if status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z":
            return None
    except (FileNotFoundError, ValueError, KeyError, TypeError, ProcessLookupError, OverflowError):
        return None
    except PermissionError:  # running as another user
        return url, certificate
    return url, certificate


def read_token(config: Config, server: str) -> str:
    """The token for this server. The token in the state folder is never sent to another machine."""
    if config.token_file is not None:
        return read_secret_file(config.token_file)
    if not is_loopback(server) and server != embedded_server_url(config.home):
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


def write_token(path: Path, token: str) -> None:
    """Replace the token in a file, which only its owner can read. Never partly written."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token + "\n")
    os.replace(draft, path)


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _path(text: str, user_home: Path) -> Path:
    return Path(os.path.abspath(user_home / text[2:] if text.startswith("~/") else text))


def _read_file(file: Path) -> tuple[dict[str, Any], list[str]]:
    """The known fields, and what is wrong with the others or the file."""
    if file.is_dir():
        return {}, [f"{file}: is a folder; TPUFLEET_CONFIG must name a file"]
    if not file.is_file():
        return {}, []
    import yaml  # slow to import and rarely needed

    from tpufleet.model.values import unique_keys

    try:
        written = file.read_text()
        values, duplicates = unique_keys.load(written)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        return {}, [f"{file}{line}: not valid YAML: {problem}; fix or delete it"]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
        problem = str(error).splitlines()[0]
        return {}, [f"{file}: cannot be read: {problem}; fix or delete the file"]
    if values is None:
        return {}, []
    if not isinstance(values, dict):
        return {}, [f"{file}: must be a mapping, such as `server: https://fleet.example:8470`"]
    errors = [f"{file}:{line}: {key}: duplicate key; remove one" for line, key in duplicates]
    for key in values:
        if key not in KEYS:
            close = difflib.get_close_matches(str(key), KEYS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known fields: {', '.join(KEYS)}"
            errors.append(f"{file}{_line_of(str(key), written)}: {key}: unknown field; {hint}")
    known = {key: value for key, value in values.items() if key in KEYS and value is not None}
    return known, errors


def _line_of(key: str, written: str) -> str:
    """`:3`; empty for a key that is not at the beginning of a line."""
    for number, line in enumerate(written.splitlines(), start=1):
        if line.startswith(f"{key}:"):
            return f":{number}"
    return ""


def _providers(
    environ: Mapping[str, str], values: Mapping[str, Any], file: Path
) -> tuple[str, ...] | None:
    names, source = _names("providers", environ, values, file)
    if not source:
        return None
    check_providers(list(names), source)
    return names


def _names(
    key: str, environ: Mapping[str, str], values: Mapping[str, Any], file: Path
) -> tuple[tuple[str, ...], str]:
    """A list, in the environment separated by commas; and where it is from, "" if nowhere."""
    variable = f"TPUFLEET_{key.upper()}"
    if text := environ.get(variable):
        names = [name.strip() for name in text.split(",") if name.strip()]
        return tuple(dict.fromkeys(names)), variable
    if key not in values:
        return (), ""
    value = values[key]
    names = [str(name) for name in value] if isinstance(value, list) else [str(value)]
    return tuple(dict.fromkeys(names)), f"{file}: {key}"


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


def _tpu_vm(
    environ: Mapping[str, str], mapping: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """TPUFLEET_TPU_VM_ENDPOINT points a configuration for Google Cloud at an emulator."""
    endpoint = environ.get("TPUFLEET_TPU_VM_ENDPOINT", "").strip()
    return {**mapping, "endpoint": endpoint} if mapping and endpoint else mapping


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
    return parts._replace(scheme=parts.scheme.lower()).geturl().rstrip("/")


def check_providers(names: Sequence[str], source: str) -> None:
    if not names:
        raise BadInput(f"{source}: is empty; list at least one of {', '.join(PROVIDERS)}")
    for name in names:
        if name not in PROVIDERS:
            known = ", ".join(PROVIDERS)
            raise BadInput(f"{source}: unknown provider {name!r}; known providers: {known}")


def _provider(text: str, source: str) -> str:
    check_providers([text], source)
    return text


def _store(text: str, source: str) -> str:
    try:
        return store_urls.check(text)
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from error


def check_listen_address(text: str, source: str) -> str:
    match = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s]+):([0-9]{1,5})", text)
    if match is None or int(match[2]) > 65535:
        raise BadInput(
            f"{source}: {text!r} is not an address; use host:port, such as 127.0.0.1:8470"
        )
    return text


def _flag(text: str, source: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise BadInput(f"{source}: {text!r} is neither true nor false")
    return text.lower() in ("true", "1")


def _kms_key(text: str, source: str) -> str:
    if not re.fullmatch(r"projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+", text):
        raise BadInput(
            f"{source}: {text!r} is not a Cloud KMS key; use projects/PROJECT/locations/LOCATION/"
            "keyRings/RING/cryptoKeys/KEY"
        )
    return text


def _log_format(text: str, source: str) -> str:
    if text not in LOG_FORMATS:
        raise BadInput(f"{source}: {text!r} is not a log format; use {' or '.join(LOG_FORMATS)}")
    return text


def _count_of(things: str) -> Callable[[str, str], int]:
    def parse(text: str, source: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or int(text) < 1:
            raise BadInput(
                f"{source}: {text!r} is not a number of {things}; use a whole number of at least 1"
            )
        return int(text)

    return parse


def _timeout(text: str, source: str) -> timedelta:
    try:
        span = durations.parse(text)
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from error
    if span is None or span < timedelta(seconds=1):
        raise BadInput(f"{source}: must be at least 1s, such as 2m")
    return span


def _half_life(text: str, source: str) -> timedelta | None:
    try:
        span = durations.parse(text)
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from error
    if span is not None and span < timedelta(minutes=1):
        raise BadInput(f"{source}: must be at least 1m; write none for no fair share")
    return span


def _percent(text: str, source: str) -> int:
    if not re.fullmatch(r"[0-9]{1,3}", text.strip()) or not 1 <= int(text) <= 100:
        raise BadInput(f"{source}: {text!r} is not a percentage; use a whole number from 1 to 100")
    return int(text)


def _size(text: str, source: str) -> int:
    try:
        return byte_sizes.parse(text)
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from error

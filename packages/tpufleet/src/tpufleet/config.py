"""Configuration: read once from the environment and the config file, then passed as arguments.

An environment variable overrides the file; a command-line option overrides both.
"""

from __future__ import annotations

import difflib
import importlib
import ipaddress
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Meta, structs

from tpufleet import schema
from tpufleet.errors import (
    BadInput,
    InvalidSettings,
    Unauthorized,
    invalid,
    not_allowed,
    readable_by_others,
    together,
    unknown,
    unreadable,
)
from tpufleet.model.values import byte_sizes, durations, store_urls
from tpufleet.model.values.names import PROVIDERS

T = TypeVar("T")

DEFAULT_SNAPSHOT_LIMIT = 100 * 2**20
DEFAULT_LOG_LIMIT = 2**30
DEFAULT_TOKENS_PER_USER = 100
# Each is a few processes of the server's machine. 64 is one v5e-256.
DEFAULT_LOCAL_HOSTS = 64
# Of settings: the module and the function that parse each.
_SECTION_PARSERS = {
    "tpu_vm": ("providers.tpu_vm.settings", "parse"),
    "compute": ("providers.compute.settings", "parse"),
    "gke": ("providers.gke.settings", "parse"),
    "retention": ("model.people.retention_rules", "parse"),
    "prices": ("model.tpu.prices", "price_table"),
    "budgets": ("model.people.budgets", "parse"),
    "notifications": ("model.people.notifications", "parse_rules"),
}
SECTIONS = tuple(_SECTION_PARSERS)
# By provider, in order of preference where the config file names none.
PROVIDER_SECTIONS = {"tpu-vm": "tpu_vm", "compute": "compute", "gke": "gke"}
_OTHER_VARIABLES = ("CONFIG", "HOME", "DEBUG", "TPU_VM_ENDPOINT", "COMPUTE_ENDPOINT")
_MISSPELT = 0.85  # least similarity; none of our other variables is as near to a setting


def parse_server_url(value: Any) -> str:
    try:
        parts = urlsplit(str(value))
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise invalid(value, "a server URL", "https://host:port")
    return parts._replace(scheme=parts.scheme.lower()).geturl().rstrip("/")


def parse_listen_address(value: Any) -> str:
    match = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s]+):([0-9]{1,5})", str(value))
    if match is None or int(match[2]) > 65535:
        raise invalid(value, "HOST:PORT", "127.0.0.1:8470")
    return str(value)


def parse_provider(value: Any) -> str:
    if value not in PROVIDERS:
        raise unknown("provider", value, PROVIDERS)
    return str(value)


def _parse_path(value: Any) -> Path:
    if not isinstance(value, str):
        raise invalid(value, "a path", "/path/to/file")
    return Path(value)


def parse_bucket(value: Any) -> str:
    if not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]{1,220}(/[^\s]*)?", str(value)):
        raise invalid(value, "a Cloud Storage location", "gs://bucket/folder")
    return str(value).rstrip("/")


def _parse_section(value: Any) -> Mapping[str, Any]:
    """JSON in the environment, or the path of a YAML file. Its fields are parsed where the section
    is used."""
    if isinstance(value, str) and value.startswith(("/", "~/")):
        file = Path(value).expanduser()
        value, errors, _ = _read_file(file)
        if errors or not file.is_file():
            raise BadInput(errors[0] if errors else f"{file}: no such file")
    elif isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadInput(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInput("must be a mapping of names to values")
    return value


_Path = Annotated[Path, schema.custom("path", _parse_path)]
_Url = Annotated[str, schema.custom("URL", parse_server_url)]
_Size = Annotated[int, schema.custom("size", lambda value: byte_sizes.parse(str(value)))]
_Store = Annotated[str, schema.custom("URL", lambda value: store_urls.check(str(value)))]
_Count = Annotated[int, Meta(ge=1, le=999_999_999)]
_Provider = Annotated[str, schema.custom("provider", parse_provider)]
_Section = Annotated[Mapping[str, Any], schema.custom("section", _parse_section)]
_KmsKey = Annotated[
    str,
    schema.text(
        "Cloud KMS key",
        "projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+",
        example="projects/PROJECT/locations/LOCATION/keyRings/RING/cryptoKeys/KEY",
    ),
]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a config file. `TPUFLEET_` and the name in capitals is the variable."""

    server: _Url | None = None  # None: the embedded server
    token_file: _Path | None = None  # None: `token` in the state folder, for a local server
    store: _Store | None = None  # None: SQLite
    # Folder shared by servers of one store; None: the state folder.
    shared: _Path | None = msgspec.field(default=None, name="data")
    secret_file: _Path | None = None  # tokens of slices derive from it; None: `secret` in `data`
    admin_token_file: _Path | None = None  # token of the user `admin`; None: see `token_file`
    provider: _Provider | None = None  # for jobs that name none; None: the first enabled one
    providers: Annotated[tuple[_Provider, ...], Meta(min_length=1)] | None = None
    listen: Annotated[str, schema.custom("address", parse_listen_address)] = "127.0.0.1:0"
    public_url: _Url | None = None  # at which agents reach the server; None: its own address
    tls_cert: _Path | None = None  # certificate chain of the server, PEM; None: plain HTTP
    tls_key: _Path | None = None  # its private key, PEM
    ca_file: _Path | None = None  # CAs that clients and agents trust besides the system's
    # Of a client's requests; None: 30 s.
    request_timeout: Annotated[timedelta | None, durations.within(1, finite=True)] = None
    insecure_http: bool = False  # plain HTTP may be reached from other machines
    snapshot_limit: _Size = DEFAULT_SNAPSHOT_LIMIT
    log_limit: _Size = DEFAULT_LOG_LIMIT  # bytes of all logs of a job
    log_format: Literal["text", "json"] = "text"  # of the server's own log
    retention: _Section | None = None  # parsed by `model.people.retention_rules`
    secrets_kms_key: _KmsKey | None = None  # that wraps the key of secrets
    local_user: schema.Text | None = None  # of jobs on `local`, if the server is root; None: auto
    local_containers: bool = False  # jobs on `local` may use images, with this machine's Docker
    local_env: tuple[schema.Text, ...] = ()  # variables of the server that jobs on `local` inherit
    local_hosts: _Count = DEFAULT_LOCAL_HOSTS  # simulated hosts at a time, of all jobs on `local`
    slices_per_user: _Count | None = None  # quota per user; None: unlimited
    tokens_per_user: _Count = DEFAULT_TOKENS_PER_USER  # that are valid; without browser sessions
    # Of usage; None: no fair share.
    fair_share_half_life: Annotated[timedelta | None, durations.within(60)] = timedelta(days=7)
    # Per minute, by missing heartbeats alone.
    max_hosts_lost_percent: Annotated[int, Meta(ge=1, le=100)] = 20
    # gs:// location for checkpoints, code and logs; None: `data`.
    bucket: Annotated[str | None, schema.custom("location", parse_bucket)] = None
    tpu_vm: _Section | None = None  # parsed by `providers.tpu_vm.settings`
    # Parsed by `providers.compute.settings`; what it leaves out is that of `tpu_vm`.
    compute: _Section | None = None
    gke: _Section | None = None  # parsed by `providers.gke.settings`
    prices: _Section | None = None  # per chip hour, by generation and capacity
    budgets: _Section | None = None  # parsed by `model.people.budgets`
    notifications: _Section | None = None  # parsed by `model.people.notifications`


KEYS = tuple(each.encode_name for each in msgspec.structs.fields(Settings))


class Config(Settings, frozen=True, kw_only=True):
    home: Path  # state folder of this server or user
    config_file: Path

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
            name
            for name, section in PROVIDER_SECTIONS.items()
            if getattr(self, section) is not None
        )
        if remote:
            return remote
        return () if self.exposed else ("local",)

    @property
    def exposed(self) -> bool:
        """Whether other machines can reach the server."""
        addresses = [f"http://{self.listen}", *([self.public_url] if self.public_url else [])]
        return not all(is_loopback(address) for address in addresses)

    def check_certificate(self) -> None:
        """Raises BadInput when the server could not start with it."""
        if self.tls_cert is None or self.tls_key is None:
            return
        import ssl  # slow, and only servers need it here

        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except OSError as error:
            reason = getattr(error, "reason", None) or error.strerror
            raise BadInput(
                f"tls_key: {self.tls_key} is not the private key of {self.tls_cert}, both in PEM: "
                f"{reason}"
            ) from error

    def check_transport(self) -> None:
        """Raises BadInput when tokens and secrets would cross a network without encryption."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise BadInput(together("tls_cert", "tls_key"))
        for path in (self.tls_cert, self.tls_key, self.ca_file):
            if path is not None and not path.is_file():
                raise BadInput(f"{path}: no such file; it is named by a TLS setting")
        if self.tls_key is not None and self.tls_key.stat().st_mode & 0o007:
            raise readable_by_others(self.tls_key, "tls_key")
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
                f"  next: set tpu_vm, compute or gke in {self.config_file}, or enable `local` for "
                "users that you trust with this machine: TPUFLEET_PROVIDERS=local"
            )
        default = self.provider or enabled[0]
        if default not in enabled:
            section = PROVIDER_SECTIONS.get(default)
            hint = f"set {section}" if section else "add it to providers"
            refused = not_allowed("provider", default, enabled)
            raise BadInput(f"{refused}\n  next: {hint} in {self.config_file}")
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


def config_file(environ: Mapping[str, str], user_home: Path) -> Path:
    base = environ.get("XDG_CONFIG_HOME") or str(user_home / ".config")
    return Path(environ.get("TPUFLEET_CONFIG") or Path(base) / "tpufleet" / "config.yaml")


def load_valid(
    environ: Mapping[str, str],
    user_home: Path,
    *,
    serve: bool = False,
    enable: Sequence[str] = (),
    tls_options: bool = False,
) -> tuple[Config, list[str]]:
    """The valid settings, with defaults in place of invalid ones; and all errors."""
    file = config_file(environ, user_home)
    written, errors, lines = _read_file(file)
    variables = {key: environ.get(f"TPUFLEET_{key.upper()}") for key in KEYS}
    document = {**written, **{key: text for key, text in variables.items() if text}}
    values, problems = schema.parse_fields(Settings, document, lax=True)
    for key, problem in problems:
        if variables.get(re.split(r"[.\[]", key)[0]):
            errors.append(f"TPUFLEET_{key.upper()}: {problem}")
        else:
            errors.append(f"{file}{lines.get(key, '')}: {key}: {problem}")
    for name, value in values.items():
        if isinstance(value, Path):
            values[name] = _path(str(value), user_home)
        elif isinstance(value, tuple):
            values[name] = tuple(dict.fromkeys(value))
    values["tpu_vm"] = _with_endpoint("tpu_vm", environ, values.get("tpu_vm"))
    compute = _with_endpoint("compute", environ, values.get("compute"))
    values["compute"] = _compute(compute, values["tpu_vm"])
    values["gke"] = _with_variables("gke", environ, values.get("gke"))
    home = _path(environ.get("TPUFLEET_HOME") or "~/.local/share/tpufleet", user_home)
    config = Config(home=home, config_file=file, **values)
    if serve and not tls_options and (config.tls_cert is None) != (config.tls_key is None):
        named, missing = ("tls_cert", "tls_key") if config.tls_cert else ("tls_key", "tls_cert")
        if missing not in {key for key, _ in problems}:
            source = _source_of(named, config, environ)
            errors.append(f"{source}: {named}: requires {missing}; set both, or neither")
    complete = frozenset((enable or config.enabled_providers) if serve else ())
    invalid: dict[str, Any] = {}
    for section in SECTIONS:
        if found := _section_errors(section, config, complete, environ):
            errors += found
            invalid[section] = None
    return structs.replace(config, **invalid), errors


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
    module, name = _SECTION_PARSERS[section]
    found = importlib.import_module(f"tpufleet.{module}")
    return getattr(found, name), getattr(found, "REQUIRED_EXAMPLE", {})


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
    written = _read_file(config.config_file)[0]
    return str(config.config_file) if written.get(key) is not None else "default"


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
    data = _server_record(home).get("data")
    return Path(data) if isinstance(data, str) else None


def _server_record(home: Path) -> dict[str, Any]:
    """What the server on this state folder has written about itself; empty if there is none."""
    try:
        record = json.loads((home / "server.json").read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _embedded_server(home: Path) -> tuple[str, Path | None] | None:
    record = _server_record(home)
    try:
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
                raise Unauthorized(str(readable_by_others(path)))
            value = file.read().strip()
        if not value or not value.isprintable():
            raise ValueError("no token in it")
    except (OSError, ValueError) as error:  # ValueError also: not text
        hint = "ask an admin to run `tpu token create`"
        raise Unauthorized(str(unreadable(path, error, hint=hint))) from error
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


def _read_file(file: Path) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """The fields, what is wrong with the file, and where unknown fields are in it: `:3`."""
    if file.is_dir():
        return {}, [f"{file}: is a folder; TPUFLEET_CONFIG must name a file"], {}
    if not file.is_file():
        return {}, [], {}
    import yaml  # slow to import and rarely needed

    from tpufleet.model.values import unique_keys

    try:
        written = file.read_text()
        values, duplicates = unique_keys.load(written)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        return {}, [f"{file}{line}: not valid YAML: {problem}; fix or delete it"], {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
        problem = str(error).splitlines()[0]
        return {}, [f"{file}: cannot be read: {problem}; fix or delete the file"], {}
    if values is None:
        return {}, [], {}
    if not isinstance(values, dict):
        return {}, [f"{file}: must be a mapping, such as `server: https://fleet.example:8470`"], {}
    errors = [f"{file}:{line}: {key}: duplicate key; remove one" for line, key in duplicates]
    lines = {
        line.partition(":")[0]: f":{number}"
        for number, line in enumerate(written.splitlines(), start=1)
        if line.partition(":")[0] not in KEYS
    }
    return values, errors, lines


def _with_endpoint(
    key: str, environ: Mapping[str, str], mapping: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """TPUFLEET_TPU_VM_ENDPOINT points a configuration for Google Cloud at an emulator; likewise for
    `compute`."""
    endpoint = environ.get(f"TPUFLEET_{key.upper()}_ENDPOINT", "").strip()
    return {**mapping, "endpoint": endpoint} if mapping and endpoint else mapping


def _compute(
    mapping: Mapping[str, Any] | None, tpu_vm: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Both sections are of one project, network and bundle as a rule."""
    if mapping is None or not tpu_vm:
        return mapping
    from tpufleet.providers.compute import settings as compute

    return {**{key: value for key, value in tpu_vm.items() if key in compute.SHARED}, **mapping}


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


def checked(parse: Callable[[Any], T], value: Any, source: str) -> T:
    """The value of an option. Errors begin with its source."""
    try:
        return parse(value)
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from error

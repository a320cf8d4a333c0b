"""What the agent is told when it starts: read once from the environment, then passed down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tpufleet import errors
from tpufleet.model import hosts
from tpufleet.model.hosts import HostId, NoticeKind
from tpufleet.model.slices import SliceId

TOKEN_VARIABLE, BOOTSTRAP_TOKEN_VARIABLE = "TPUFLEET_TOKEN", "TPUFLEET_ENTRY"


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSettings:
    server: str
    slice_id: SliceId
    host_index: int
    num_hosts: int  # of this slice
    token: str = field(repr=False)
    bootstrap_token: str = field(
        default="", repr=False
    )  # the word to get the token for, where there is one
    work_dir: Path  # one folder per attempt in here
    address: str  # how other hosts of the gang reach this one
    coordinator_port: int
    chips: int
    notice_file: Path | None = None
    platform: str = ""  # "cpu" on simulated slices
    server_timeout_seconds: float | None = (
        None  # for a control plane that does not answer; None: for ever
    )
    metadata_url: str = ""  # URL of the machine's metadata server, where it has one
    sigterm_notice: NoticeKind | None = None  # where only the cloud ends an agent that way
    scratch_dir: Path | None = None  # where the cloud ends who uses more disk than it may
    scratch_limit_bytes: int = 0

    @property
    def host_id(self) -> HostId:
        return hosts.host_id(self.slice_id, self.host_index)


def from_environ(environ: Mapping[str, str]) -> AgentSettings:
    notice_file = environ.get("TPUFLEET_NOTICE_FILE")
    scratch = environ.get("TPUFLEET_SCRATCH", "")
    waits = environ.get("TPUFLEET_WAITS_SECONDS")
    return AgentSettings(
        server=_text(environ, "TPUFLEET_SERVER"),
        slice_id=SliceId(_text(environ, "TPUFLEET_SLICE")),
        host_index=_number(environ, "TPUFLEET_HOST_INDEX"),
        num_hosts=_number(environ, "TPUFLEET_HOSTS"),
        token=_own_token(environ),
        bootstrap_token=environ.get(BOOTSTRAP_TOKEN_VARIABLE, ""),
        work_dir=Path(_text(environ, "TPUFLEET_WORK")).absolute(),
        address=_text(environ, "TPUFLEET_ADDRESS"),
        coordinator_port=_number(environ, "TPUFLEET_COORDINATOR_PORT"),
        chips=_number(environ, "TPUFLEET_CHIPS"),
        notice_file=Path(notice_file) if notice_file else None,
        platform=environ.get("TPUFLEET_PLATFORM", ""),
        server_timeout_seconds=float(waits) if waits else None,
        metadata_url=environ.get("TPUFLEET_METADATA", ""),
        sigterm_notice=NoticeKind(told)
        if (told := environ.get("TPUFLEET_SIGTERM_MEANS"))
        else None,
        scratch_dir=Path(scratch) if scratch else None,
        scratch_limit_bytes=_number(environ, "TPUFLEET_SCRATCH_BYTES") if scratch else 0,
    )


def _text(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise errors.BadInput(f"{name} is not set; an agent is started by its provider")
    return value


def _number(environ: Mapping[str, str], name: str) -> int:
    value = _text(environ, name)
    if not value.isdecimal():
        raise errors.BadInput(f"{name} must be a whole number, not {value!r}")
    return int(value)


def _own_token(environ: Mapping[str, str]) -> str:
    """From a file; or from within this process, never from an environment that was given to it:
    others could read that. Empty while there is only a word to get it for."""
    if environ.get(BOOTSTRAP_TOKEN_VARIABLE):
        return ""
    return environ.get(TOKEN_VARIABLE) or _token(Path(_text(environ, "TPUFLEET_TOKEN_FILE")))


def _token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise errors.BadInput(f"TPUFLEET_TOKEN_FILE cannot be read: {error}") from error
    if not token:
        raise errors.BadInput(f"TPUFLEET_TOKEN_FILE is empty: {path}")
    return token

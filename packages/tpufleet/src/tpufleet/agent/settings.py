"""The agent's settings, read once from the environment that its provider set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tpufleet import errors
from tpufleet.client import tls
from tpufleet.model.fleet import hosts
from tpufleet.model.fleet.hosts import HostId, NoticeKind
from tpufleet.model.fleet.slices import SliceId
from tpufleet.runtime.context import whole_number

CA_VARIABLE = "TPUFLEET_CA_CERTIFICATES"
TOKEN_VARIABLE, BOOTSTRAP_TOKEN_VARIABLE = "TPUFLEET_TOKEN", "TPUFLEET_ENTRY"
NONCE_FILE_VARIABLE = "TPUFLEET_NONCE_FD"


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSettings:
    server: str
    slice_id: SliceId
    host_index: int
    num_hosts: int  # of this slice
    token: str = field(repr=False)
    bootstrap_token: str = field(default="", repr=False)  # to exchange for the token, if set
    nonce: str = field(default="", repr=False)  # to exchange it with; empty: a new one
    work_dir: Path  # holds one folder per attempt
    address: str  # at which other hosts of the gang reach this one
    coordinator_port: int
    chips: int
    notice_file: Path | None = None
    ca_file: Path | None = None  # CAs of the server's certificate, besides the system's
    job_python: str = ""  # "uv": every job gets an environment, not only those that ask for one
    ca_certificates: str = ""  # the same, in PEM, as the provider passed them on
    proxy: str | None = None  # on the way to the server
    platform: str = ""  # "cpu" on simulated slices
    # The agent exits when the server is unreachable for this long; None: never.
    server_timeout_seconds: float | None = None
    metadata_url: str = ""  # of the instance metadata server, if there is one
    multislice: bool = False  # the cloud made this slice as one of several
    bare_endpoints: bool = False  # the metadata names the workers without addresses
    sigterm_notice: NoticeKind | None = None  # what SIGTERM means where only the cloud sends it
    scratch_dir: Path | None = None  # where the cloud evicts a pod that exceeds the limit
    scratch_limit_bytes: int = 0
    images: bool = True  # jobs may use them
    echo_output: bool = False  # copy the output of programs to that of the agent

    @property
    def certificates(self) -> str:
        """All of `ca_file` and `ca_certificates`, in PEM."""
        file = self.ca_file.read_text() if self.ca_file is not None else ""
        return "\n".join(part.strip() for part in (file, self.ca_certificates) if part)

    @property
    def host_id(self) -> HostId:
        return hosts.host_id(self.slice_id, self.host_index)


def from_environ(environ: Mapping[str, str]) -> AgentSettings:
    notice_file = environ.get("TPUFLEET_NOTICE_FILE")
    scratch_dir = environ.get("TPUFLEET_SCRATCH", "")
    sigterm_notice = environ.get("TPUFLEET_SIGTERM_MEANS")
    server_timeout = environ.get("TPUFLEET_WAITS_SECONDS")
    return AgentSettings(
        server=_text(environ, "TPUFLEET_SERVER"),
        slice_id=SliceId(_text(environ, "TPUFLEET_SLICE")),
        host_index=_integer(environ, "TPUFLEET_HOST_INDEX"),
        num_hosts=_integer(environ, "TPUFLEET_HOSTS"),
        token=_token(environ),
        bootstrap_token=environ.get(BOOTSTRAP_TOKEN_VARIABLE, ""),
        work_dir=Path(_text(environ, "TPUFLEET_WORK")).absolute(),
        address=_text(environ, "TPUFLEET_ADDRESS"),
        coordinator_port=_integer(environ, "TPUFLEET_COORDINATOR_PORT"),
        chips=_integer(environ, "TPUFLEET_CHIPS"),
        notice_file=Path(notice_file) if notice_file else None,
        ca_file=Path(environ["TPUFLEET_CA_FILE"]) if environ.get("TPUFLEET_CA_FILE") else None,
        job_python=environ.get("TPUFLEET_JOB_PYTHON", ""),
        ca_certificates=environ.get(CA_VARIABLE, ""),
        proxy=tls.proxy_for(_text(environ, "TPUFLEET_SERVER"), environ),
        platform=environ.get("TPUFLEET_PLATFORM", ""),
        server_timeout_seconds=float(server_timeout) if server_timeout else None,
        metadata_url=environ.get("TPUFLEET_METADATA", ""),
        multislice=environ.get("TPUFLEET_MULTISLICE") == "1",
        bare_endpoints=environ.get("TPUFLEET_BARE_ENDPOINTS") == "1",
        sigterm_notice=NoticeKind(sigterm_notice) if sigterm_notice else None,
        scratch_dir=Path(scratch_dir) if scratch_dir else None,
        scratch_limit_bytes=_integer(environ, "TPUFLEET_SCRATCH_BYTES") if scratch_dir else 0,
        images=environ.get("TPUFLEET_IMAGES") != "refused",
        echo_output=environ.get("TPUFLEET_ECHO") == "1",
    )


def _text(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise errors.BadInput(f"{name} is not set; agents are started by their provider")
    return value


def _integer(environ: Mapping[str, str], name: str) -> int:
    _text(environ, name)
    return whole_number(environ, name)


def _token(environ: Mapping[str, str]) -> str:
    """The slice token, from a file or from this process's own mapping, never from the process
    environment, which others can read. Empty where a bootstrap token is still to be exchanged."""
    if environ.get(BOOTSTRAP_TOKEN_VARIABLE):
        return ""
    return environ.get(TOKEN_VARIABLE) or _read_token_file(
        Path(_text(environ, "TPUFLEET_TOKEN_FILE"))
    )


def _read_token_file(path: Path) -> str:
    try:
        token, problem = path.read_text().strip(), "it is empty"
    except OSError as error:
        token, problem = "", str(error)
    if not token:
        raise errors.BadInput(f"TPUFLEET_TOKEN_FILE: no token in {path}: {problem}")
    return token

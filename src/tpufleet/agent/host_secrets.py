"""Secrets that lie on the host itself: `file:/path`. The control plane passes the reference on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tpufleet.errors import BadInput

PREFIX = "file:"


def resolve_secrets(secrets: Mapping[str, str], token: str) -> dict[str, str]:
    """Every secret by value. One that cannot be read fails the attempt before anything runs."""
    return {
        name: _read(name, value, token) if value.startswith(PREFIX) else value
        for name, value in secrets.items()
    }


def _read(name: str, reference: str, token: str) -> str:
    path = Path(reference.removeprefix(PREFIX))
    try:
        value = path.read_text().removesuffix("\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise BadInput(f"secret {name}: {path} cannot be read on this host: {reason}") from error
    if token in value:
        raise BadInput(f"secret {name}: {path} holds the credential of this host, not of a job")
    return value

"""URLs of stores."""

from __future__ import annotations

from tpufleet.errors import BadInput


def check(url: str) -> str:
    """Raises BadInput when no store has such a URL."""
    sqlite = url.startswith("sqlite:///") and url != "sqlite:///"
    if url != "memory:" and not sqlite and not url.startswith(("postgresql://", "postgres://")):
        # The URL may contain a password, so only its scheme is shown.
        raise BadInput(
            f"unknown store {url.partition(':')[0] + ':…'!r}; "
            "write memory:, sqlite:///path/fleet.db or postgresql://user@host/database"
        )
    return url

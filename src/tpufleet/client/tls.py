"""Which certificates of a control plane are trusted."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from tpufleet.errors import BadInput

if TYPE_CHECKING:
    import ssl


def verification(url: str, ca_file: str | PathLike[str] | None) -> ssl.SSLContext | bool:
    """For httpx. Loading certificates takes longer than a call, and plain HTTP needs none."""
    if not url.startswith("https:"):
        return False
    if ca_file is None:
        return True
    import ssl

    context = ssl.create_default_context()
    try:
        context.load_verify_locations(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise BadInput(f"ca_file: cannot read certificates from {ca_file}: {error}") from error
    return context

"""What every group of routes is built on."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from tpufleet.client.transport import Transport


class Routes:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def _get(self, path: str, answer: Any, **params: Any) -> Any:
        return self._transport.call("GET", path, answer, params=params)


def path_segment(text: str) -> str:
    """Part of a path, whatever it holds. An empty one still names something: nothing we have."""
    return quote(text, safe="") or "%20"

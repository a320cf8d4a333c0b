"""Bookmarks of the page of the former job manager, and where they lead."""

from __future__ import annotations

import re

# Nothing but the name of a user is taken from an address, so no link leads to another site.
_USER = r"(?P<user>[A-Za-z0-9][A-Za-z0-9._-]{0,63})"
_ADDRESSES = (
    (re.compile(rf"/user/{_USER}/?"), "/#/jobs?q=owner:{user}"),
    (re.compile(rf"/log/{_USER}/[0-9]+/?"), "/#/jobs?q=owner:{user}"),
    (re.compile(r"/tpus/?"), "/#/inventory"),
    (re.compile(r"/log(in|out)/?"), "/#/jobs"),
)


def redirect(path: str) -> str | None:
    for pattern, address in _ADDRESSES:
        if match := pattern.fullmatch(path):
            return address.format(**match.groupdict())
    return None

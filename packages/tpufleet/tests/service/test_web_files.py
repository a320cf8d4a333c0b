"""The files of the web page."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from starlette.requests import Request

from tpufleet.service.web.pages import WebPages


def answer(pages: WebPages, path: str = "/") -> tuple[int, bytes]:
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
    response = pages.respond(Request({**scope, "scheme": "http", "server": ("fleet", 80)}))
    return response.status_code, bytes(response.body)


def test_a_page_that_is_built_while_the_server_runs_is_served(tmp_path: Path):
    folder = tmp_path / "static"
    pages = WebPages(folder)
    assert answer(pages)[0] == 503
    (folder / "assets").mkdir(parents=True)
    (folder / "assets" / "main-1.js").write_text("1")
    (folder / "index.html").write_text("first")
    assert answer(pages) == (200, b"first")
    assert answer(pages, "/assets/main-1.js") == (200, b"1")
    (folder / "index.html").write_text("second")
    os.utime(folder / "index.html", ns=(1, 1))
    assert answer(pages) == (200, b"second")
    (folder / "index.html").unlink()  # the next build has begun
    assert answer(pages) == (200, b"second")


@pytest.mark.parametrize(
    ("scheme", "host", "told"),
    [("https", "fleet", True), ("http", "fleet", False), ("https", "localhost", False)],
)
def test_a_browser_is_told_to_stay_with_https(tmp_path: Path, scheme, host, told):
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
    request = Request({**scope, "scheme": scheme, "server": (host, 8443)})
    headers = WebPages(tmp_path).respond(request).headers
    assert ("Strict-Transport-Security" in headers) == told

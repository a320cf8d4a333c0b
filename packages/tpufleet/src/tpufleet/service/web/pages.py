"""The files of the web page, served from memory. They hold no data, so they need no token."""

from __future__ import annotations

import gzip
import mimetypes
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from tpufleet.entry_points import registered

STATIC_FOLDER = Path(__file__).parent / "static"
NOT_BUILT = (
    "The web page was not built. In a clone, run scripts/build-web; installed packages have it.\n"
)
ASSET_PREFIX = "/assets/"
# Entry points of other distributions: functions from the path of an address to where it leads, or
# None. They lead to the page, never to another site.
REDIRECTS = "tpufleet.redirects"

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True, kw_only=True)
class StaticFile:
    content: bytes
    media_type: str
    cache: str

    @cached_property
    def zipped(self) -> bytes:
        return gzip.compress(self.content, mtime=0)


class WebPages:
    def __init__(self, folder: Path = STATIC_FOLDER) -> None:
        self._folder = folder
        self._built_at = _built_at(folder)
        self._files = _read(folder)

    def is_public(self, path: str, method: str) -> bool:
        """Whether this is a file of the page, or leads to it."""
        return method in ("GET", "HEAD") and (
            path in ("/", "/favicon.svg")
            or path.startswith(ASSET_PREFIX)
            or _redirected(path) is not None
        )

    def respond(self, request: Request) -> Response:
        response = self._respond(request)
        # Of a name that other servers on this machine share with it, the browser must not remember.
        if request.url.scheme == "https" and request.url.hostname != "localhost":
            response.headers["Strict-Transport-Security"] = "max-age=31536000"
        return response

    def _respond(self, request: Request) -> Response:
        path = "/index.html" if request.url.path == "/" else request.url.path
        if path == "/index.html":
            self._read_again()
        if (address := _redirected(path)) is not None:
            return RedirectResponse(address, status_code=302, headers=HEADERS)
        file = self._files.get(path)
        if file is None:
            if not self._files:
                return PlainTextResponse(NOT_BUILT, status_code=503)
            return PlainTextResponse("no such file\n", status_code=404, headers=HEADERS)
        headers = {**HEADERS, "Cache-Control": file.cache, "Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["Content-Encoding"] = "gzip"
            return Response(file.zipped, media_type=file.media_type, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    def _read_again(self) -> None:
        """In a clone, `tpu dash` builds the page while the server runs."""
        built_at = _built_at(self._folder)
        if built_at not in (None, self._built_at):
            self._files, self._built_at = _read(self._folder), built_at


def _built_at(folder: Path) -> int | None:
    try:
        return (folder / "index.html").stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _redirected(path: str) -> str | None:
    found = (
        address for redirect in registered(REDIRECTS) if (address := redirect(path)) is not None
    )
    return next(found, None)


def _read(folder: Path) -> dict[str, StaticFile]:
    files: dict[str, StaticFile] = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if not path.is_file():
            continue
        name = "/" + path.relative_to(folder).as_posix()
        content = path.read_bytes()
        # The names of assets contain a hash of their content.
        forever = name.startswith(ASSET_PREFIX)
        files[name] = StaticFile(
            content=content,
            media_type=mimetypes.guess_type(name)[0] or "application/octet-stream",
            cache="public, max-age=31536000, immutable" if forever else "no-cache",
        )
    return files

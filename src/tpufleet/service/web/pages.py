"""The files of the web page, served from memory. They hold no data, so they need no token."""

from __future__ import annotations

import gzip
import mimetypes
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

STATIC_FOLDER = Path(__file__).parent / "static"
NOT_BUILT = (
    "The web page was not built. In a clone, run scripts/build-web; installed packages have it.\n"
)
ASSET_PREFIX = "/assets/"

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


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticFile:
    content: bytes
    zipped: bytes
    media_type: str
    cache: str


class WebPages:
    def __init__(self, folder: Path = STATIC_FOLDER) -> None:
        self._files = _read(folder)

    def is_public(self, path: str, method: str) -> bool:
        """Whether this is a file of the page."""
        return method in ("GET", "HEAD") and (
            path in ("/", "/favicon.svg") or path.startswith(ASSET_PREFIX)
        )

    def respond(self, request: Request) -> Response:
        path = "/index.html" if request.url.path == "/" else request.url.path
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
            zipped=gzip.compress(content, mtime=0),
            media_type=mimetypes.guess_type(name)[0] or "application/octet-stream",
            cache="public, max-age=31536000, immutable" if forever else "no-cache",
        )
    return files

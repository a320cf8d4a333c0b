"""A small S3 server whose failures are those that its documentation describes: 503 while it scales,
connections that break within a body, and what servers of others leave out."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

RESET_ON_CLOSE = b"\1\0\0\0\0\0\0\0"  # struct linger: on, 0 seconds
PAGE_NAMES = 3  # 1,000 at Amazon


class S3Server:
    """What it holds, what it was asked, and how it behaves. `failure` returns the status and error
    code of a request, or None to serve it."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []  # METHOD key
        self.failure: Callable[[str, str], tuple[int, str] | None] = lambda method, key: None
        self.lost_responses = 0  # of writes that are stored
        self.broken_bodies = 0  # responses that end in their middle
        self.resets = True  # those: with a reset of the connection, otherwise closed
        self.on_broken_body: Callable[[], None] = lambda: None
        self.conditions = True  # honors If-Match and If-None-Match
        self.stored_bytes: int | None = None  # of each object; None: all
        self.part_bytes = 0  # of objects that were sent in parts; 0: in one piece
        self.kms = False  # encrypted with a key, so that an ETag is no MD5
        self.checksums: dict[str, Callable[[bytes], bytes]] = {}  # that are kept, by algorithm
        self.damaged_bodies = False  # a bit of each is another
        self.url = ""

    def etag(self, data: bytes) -> str:
        """Of an object that was sent in parts: of their digests, and their number."""
        if self.kms:
            return f'"{hashlib.md5(b"key" + data).hexdigest()}"'
        md5 = lambda data: hashlib.md5(data).digest()
        digest, count = self._of_parts(md5, data)
        return f'"{digest.hex()}{count}"'

    def checksum_headers(self, data: bytes) -> dict[str, str]:
        headers = {"x-amz-checksum-type": "COMPOSITE" if self.part_bytes else "FULL_OBJECT"}
        for name, function in self.checksums.items():
            digest, count = self._of_parts(function, data)
            headers[f"x-amz-checksum-{name}"] = base64.b64encode(digest).decode() + count
        return headers

    def _of_parts(self, function: Callable[[bytes], bytes], data: bytes) -> tuple[bytes, str]:
        if not self.part_bytes:
            return function(data), ""
        starts = range(0, len(data), self.part_bytes)
        digests = [function(data[start : start + self.part_bytes]) for start in starts]
        return function(b"".join(digests)), f"-{len(digests)}"


@contextmanager
def s3_server() -> Iterator[S3Server]:
    state = S3Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = urlsplit(self.path)
            bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
            state.requests.append(f"{self.command} {key}".strip())
            if failure := state.failure(self.command, key):
                return self._error(*failure)
            if bucket != "lab":
                return self._error(404, "NoSuchBucket")
            if self.command == "PUT":
                return self._put(key, body)
            if self.command == "DELETE":
                state.objects.pop(key, None)
                return self._answer(204, b"")
            if not key:
                return self._list({name: value[0] for name, value in parse_qs(parts.query).items()})
            return self._get(key, int(parse_qs(parts.query).get("partNumber", ["0"])[0]))

        do_GET = do_PUT = do_DELETE = do_HEAD = serve

        def _put(self, key: str, body: bytes) -> None:
            if state.conditions and self.headers.get("If-None-Match") and key in state.objects:
                return self._error(412, "PreconditionFailed")
            state.objects[key] = body[: state.stored_bytes]
            if state.lost_responses:
                state.lost_responses -= 1
                self.close_connection = True
                return None
            return self._answer(200, b"", ETag=state.etag(body))

        def _get(self, key: str, part: int) -> None:
            if key not in state.objects:
                return self._error(404, "NoSuchKey")
            data = state.objects[key]
            headers = {"ETag": state.etag(data)}
            if state.conditions and self.headers.get("If-Match") not in (None, headers["ETag"]):
                return self._error(412, "PreconditionFailed")
            if state.kms:
                headers["x-amz-server-side-encryption"] = "aws:kms"
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if part and state.part_bytes:
                first = (part - 1) * state.part_bytes
                return self._answer(206, data[first : first + state.part_bytes], **headers)
            if asked is None:  # ranges come without the checksum of the whole
                if self.headers.get("x-amz-checksum-mode") == "ENABLED":
                    headers |= state.checksum_headers(data)
                return self._answer(200, data, **headers)
            first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            body = bytearray(data[first : last + 1])
            body[-1] ^= state.damaged_bodies
            return self._answer(206, bytes(body), **headers)

        def _list(self, query: dict[str, str]) -> None:
            after = query.get("continuation-token") or query.get("start-after", "")
            names = sorted(
                key
                for key in list(state.objects)
                if key.startswith(query.get("prefix", "")) and key > after
            )
            page = names[:PAGE_NAMES]
            more, truncated = "", "false"
            if len(names) > len(page):
                more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
                truncated = "true"
            entries = "".join(f"<Contents><Key>{escape(key)}</Key></Contents>" for key in page)
            self._answer(
                200,
                f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{more}{entries}"
                "</ListBucketResult>".encode(),
            )

        def _error(self, status: int, code: str) -> None:
            self._answer(status, f"<Error><Code>{code}</Code></Error>".encode())

        def _answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if status != 204:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if self.command == "GET" and status < 300 and state.broken_bodies:
                state.broken_bodies -= 1
                state.on_broken_body()
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                if state.resets:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                self.connection.close()
                self.close_connection = True
                return
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""A proxy in front of a real Postgres that can freeze: connections stay open, nothing answers."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import quote

from tests import postgres


class FreezingProxy:
    def __init__(self) -> None:
        url = postgres.fresh_url()
        from psycopg.conninfo import conninfo_to_dict

        target = conninfo_to_dict(url)
        self._path = f"{target['host']}/.s.PGSQL.{target.get('port', 5432)}"
        self._flowing = threading.Event()
        self._flowing.set()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.url = (
            f"postgresql://{target['user']}@127.0.0.1:{port}/{target['dbname']}"
            f"?options={quote(str(target['options']))}"
        )
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    def close(self) -> None:
        self.thaw()
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._path)
            self._sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flowing.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

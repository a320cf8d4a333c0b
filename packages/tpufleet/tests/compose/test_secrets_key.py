"""The key of secrets, wrapped by a key service. The stand-in follows Cloud KMS's REST reference."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from tpufleet.compose.secrets_key import CloudKms, secrets_key, unwrapped_key
from tpufleet.config import Config
from tpufleet.errors import BadInput, Unreachable
from tpufleet.stores.memory import MemoryStore

NAME = "projects/p/locations/europe-west4/keyRings/r/cryptoKeys/k"


class Kms(BaseHTTPRequestHandler):
    """Encrypts by reversing. Keys other than NAME are refused, as without permission."""

    def do_POST(self) -> None:
        name, _, verb = self.path.removeprefix("/v1/").rpartition(":")
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        source, result = {
            "encrypt": ("plaintext", "ciphertext"), "decrypt": ("ciphertext", "plaintext"),
        }[verb]  # fmt: skip
        status, answer = 403, {"error": {"code": 403, "status": "PERMISSION_DENIED"}}
        if name == NAME:
            data = base64.b64decode(body[source])[::-1]
            status, answer = 200, {result: base64.b64encode(data).decode()}
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Kms)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def kms(url: str, name: str = NAME) -> CloudKms:
    return CloudKms(name, httpx.Client(trust_env=False), url)


def test_the_key_is_created_once_and_only_stored_wrapped(url):
    store = MemoryStore()
    key = unwrapped_key(store, kms(url))
    assert len(key) == 32 and unwrapped_key(store, kms(url)) == key
    stored = store.metadata("wrapped secrets key")
    assert stored is not None and base64.b64encode(key).decode() not in stored
    with pytest.raises(BadInput, match="encrypted with projects/p"):
        unwrapped_key(store, kms(url, NAME + "2"))


def test_a_server_without_permission_is_told_which_role_it_needs(url):
    with pytest.raises(Unreachable, match=r"roles/cloudkms\.cryptoKeyEncrypterDecrypter"):
        unwrapped_key(MemoryStore(), kms(url, NAME + "2"))


def test_an_unreachable_service_is_named():
    with pytest.raises(Unreachable, match=r"Cloud KMS .* is unreachable"):
        unwrapped_key(MemoryStore(), kms("http://127.0.0.1:1"))


class SlowService:
    """Meanwhile another server stores a key."""

    name = "slow"

    def __init__(self, meanwhile) -> None:
        self._meanwhile = meanwhile

    def encrypt(self, plaintext: bytes) -> bytes:
        meanwhile, self._meanwhile = self._meanwhile, lambda: None
        meanwhile()
        return plaintext[::-1]

    def decrypt(self, ciphertext: bytes) -> bytes:
        return ciphertext[::-1]


def test_two_servers_that_start_for_the_first_time_use_one_key(tmp_path):
    store, keys = MemoryStore(), []
    other = SlowService(lambda: None)
    service = SlowService(lambda: keys.append(unwrapped_key(store, other)))
    assert [unwrapped_key(store, service)] == keys


def test_without_its_service_a_wrapped_key_is_not_replaced(url, tmp_path):
    store, settings = MemoryStore(), Config(home=tmp_path, config_file=tmp_path / "c")
    assert secrets_key(settings, store) is None
    unwrapped_key(store, kms(url))
    with pytest.raises(BadInput, match="next: set secrets_kms_key"):
        secrets_key(settings, store)

"""What a member who means harm can reach of another member and of the servers: three servers behind
TLS on one Postgres, and simulated slices that all share."""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import ssl
import tarfile
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from tests.polling import wait_until
from tests.security.lab import SECRET, Lab
from tpufleet.agent.workload import containment
from tpufleet.client.fleet import FleetClient, new_job_id
from tpufleet.errors import FleetError, Unauthorized
from tpufleet.linux import sandbox
from tpufleet.model.api_types import JobChanges
from tpufleet.model.people.users import JOB_TOKEN_PREFIX, TOKEN_PREFIX

SERVERS = (0, 1, 2)
# Seconds: streams check the token every two seconds, on a busy machine.
STREAM_ENDS_WITHIN = 30.0
TOKEN = re.compile(rf"({TOKEN_PREFIX}|{JOB_TOKEN_PREFIX})[\w.-]{{20}}".encode())


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("hostile")
    for path in (folder, *folder.parents):
        if path.owner() == "root" and not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o011)  # jobs run as another user
    lab = Lab(folder)
    try:
        lab.start()
        yield lab
    finally:
        lab.cleanup()


@pytest.fixture(scope="module")
def victim(lab: Lab) -> str:
    """A job that runs, with a secret."""
    with lab.client("vic") as client:
        client.put_secret("KEY", SECRET)
    job = lab.submit("vic", "victim.py", secrets={"KEY": "KEY"})
    lab.wait_for_line(job, "ready")
    lab.wait_for_state(job, "running")  # from then on its row does not change
    return job


@pytest.fixture
def http(lab: Lab, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    context = ssl.create_default_context(cafile=str(lab.ca_file))
    with httpx.Client(
        base_url=lab.servers[request.param].url + "/api/v1",
        headers={"Authorization": f"Bearer {lab.tokens['mal']}"},
        verify=context, trust_env=False, timeout=60,
    ) as client:  # fmt: skip
        yield client


def test_a_job_reaches_nothing_of_the_job_of_another_member(lab, victim):
    home = lab.servers[0].home
    if not containment.detect(home, hidden=(home,)).isolated:
        pytest.skip("this host offers no namespaces")
    folders = [str(lab.data), *(str(server.home) for server in lab.servers)]
    job = lab.submit("mal", "attacker.py", *folders, victim)
    lab.wait_for_end(job)
    log = lab.log(job)
    shared = set() if sandbox.confines_sockets() else {"abstract sockets"}
    assert set(re.findall(r"REACHED ([a-z ]*[a-z])", log)) <= shared, lab.describe(job)
    assert log.count("refused") + log.count("REACHED") == 8, lab.describe(job)


def calls(job: str, token: str, slice_id: str) -> dict[str, tuple[str, str, object]]:
    return {
        "cancel": ("POST", f"/jobs/{job}/cancel", None),
        "edit": ("PATCH", f"/jobs/{job}", {"notes": "mine"}),
        "rerun": ("POST", f"/jobs/{job}/rerun", {"id": "mine"}),
        "resume": ("POST", f"/jobs/{job}/resume", {"id": "mine"}),
        "hold": ("POST", f"/queue/{job}/hold", None),
        "link to the log": (
            "POST", f"/jobs/{job}/links", {"resource": "logs", "expires_in": "PT1H"},
        ),
        "archive": ("POST", "/archive", {"jobs": [job]}),
        "purge": ("POST", "/purge", {"jobs": [job]}),
        "tokens": ("GET", "/tokens?user=vic", None),
        "a token": ("POST", "/tokens", {"user": "vic"}),
        "revoke": ("DELETE", f"/tokens/{token}", None),
        "revoke all": ("DELETE", "/tokens?user=vic", None),
        "rotate": ("POST", f"/tokens/{token}/rotate", {}),
        "uses of a token": ("GET", f"/tokens/{token}/audit", None),
        "become admin": ("POST", "/users", {"name": "mal", "role": "admin"}),
        "delete the user": ("DELETE", "/users/vic", None),
        "preferences": ("GET", "/preferences?user=vic", None),
        "change preferences": ("PATCH", "/preferences?user=vic", {"view": "x"}),
        "secret of all": ("PUT", "/secrets/KEY?shared=true", {"value": "x"}),
        "a command on its host": (
            "POST", f"/slices/{slice_id}/commands", {"id": "c1", "command": ["env"]},
        ),
        "preempt": ("POST", f"/slices/{slice_id}/fault", {"fault": "preempt"}),
        "release": ("POST", f"/slices/{slice_id}/release", None),
        "unregister": ("DELETE", f"/slices/{slice_id}", None),
        "pool": ("PUT", "/pools/mine", {"name": "mine", "accelerator": "v5e-4"}),
    }  # fmt: skip


@pytest.mark.parametrize("http", SERVERS, indirect=True, ids=["one", "two", "three"])
def test_no_server_lets_a_member_change_what_belongs_to_another(lab, victim, http):
    token = next(row.id for row in lab.admin.tokens("vic"))
    slice_id = lab.admin.job(victim).slices[0].id
    before = lab.admin.job(victim).job
    assert TOKEN.search(lab.tokens["vic"].encode())
    for name, (method, path, body) in calls(victim, token, slice_id).items():
        answer = http.request(method, path, json=body)
        own = answer.status_code == 200 and method == "GET" and '"vic"' not in answer.text
        refused = 400 <= answer.status_code < 500
        assert own or refused, f"{name}: {answer.status_code} {answer.text}"
        assert SECRET not in answer.text and not TOKEN.search(answer.content), name
    assert lab.admin.job(victim).job == before
    with lab.client("vic") as client:
        assert client.me().name == "vic" and client.secrets().own == ("KEY",)


def refused_jobs(lab: Lab, victim: str) -> dict[str, dict[str, object]]:
    """Fields of jobs, beside those that each needs."""
    checkpoints, name = lab.data / "checkpoints", lab.admin.job(victim).job.spec.name
    return {
        "its checkpoints": {"checkpoint": f"{checkpoints}/{victim}"},
        "its checkpoints by another path": {"checkpoint": f"{checkpoints}/x/../{victim}/."},
        "all checkpoints": {"checkpoint": str(checkpoints)},
        "state of the servers": {"checkpoint": str(lab.data)},
        "folder above the state": {"checkpoint": str(lab.data.parent)},
        "memory of a process": {"checkpoint": "/proc/1/root/tmp/x"},
        "its secret": {"secrets": {"X": "KEY"}},
        "its name as an id": {"id": name},
        "its id": {"id": victim},
        "priority": {"priority": 1_000_000_000},
        "control characters": {"name": "a\x1b]0;b\x07"},
        "direction of text": {"name": "a\u202eb"},
        "endless time": {"timeout": "1e308h"},
        "null in the environment": {"env": {"A": "a\0b"}},
    }


@pytest.mark.parametrize("http", SERVERS, indirect=True, ids=["one", "two", "three"])
def test_a_member_submits_nothing_that_takes_from_others(lab, victim, http):
    before = lab.admin.job(victim).job
    for name, fields in refused_jobs(lab, victim).items():
        job = str(fields.pop("id", new_job_id()))
        spec = {"name": "mine", "command": ["true"], "accelerator": "v5e-4", **fields}
        answer = http.post("/jobs", json={"jobs": [{"id": job, "spec": spec}]})
        assert 400 <= answer.status_code < 500, f"{name}: {answer.status_code} {answer.text}"
        assert SECRET not in answer.text, name
    assert lab.admin.job(victim).job == before


@pytest.mark.parametrize("http", SERVERS, indirect=True, ids=["one", "two", "three"])
def test_no_detour_leads_to_what_belongs_to_another(lab, victim, http):
    own = lab.submit("mal", "-c", "pass")
    link = http.post(f"/jobs/{own}/links", json={"resource": "logs", "expires_in": "PT1H"}).json()
    path = link["path"].removeprefix("/api/v1")
    session = http.post("/session").cookies
    bare = {"Authorization": ""}
    answers = {
        "encoded path": http.post(f"/jobs/{victim}%2Fcancel"),
        "method in a header": http.get("/tokens", headers={"X-HTTP-Method-Override": "DELETE"}),
        "head of its tokens": http.head("/tokens?user=vic"),
        "link of another job": http.get(path.replace(own, victim), headers=bare),
        "link of another file": http.get(path.replace("/logs?", "/result?"), headers=bare),
        "link of another user": http.get(path.replace("user=mal", "user=vic"), headers=bare),
        "link for longer": http.get(path.replace("expires=", "expires=9"), headers=bare),
        "link to write": http.post(path, headers=bare),
        "session of another site": http.post(f"/jobs/{own}/cancel", headers=bare, cookies=session),
        "forged session": http.get("/me", headers=bare, cookies={"tpufleet_session": "a.b.c.d"}),
        "deep document": http.post("/jobs", content=b'{"jobs":' + b"[" * 100_000),
        "own token in the query": http.get(f"/me?token={lab.tokens['mal']}", headers=bare),
    }
    for host in ("169.254.169.254", "127.0.0.1", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1"):
        body = {"kind": "webhook", "address": f"https://{host}/"}
        answers[host] = http.put("/notifications/inside", json=body)
    assert http.get(path, headers=bare).status_code == 200
    for name, answer in answers.items():
        empty = answer.status_code == 200 and name in ("method in a header", "head of its tokens")
        own_only = empty and '"vic"' not in answer.text
        assert own_only or 400 <= answer.status_code < 500, f"{name}: {answer.status_code}"
        assert SECRET not in answer.text, name
    assert lab.admin.job(victim).job.state == "running"
    with lab.client("mal") as client:
        assert client.me().name == "mal", "its tokens are as before"


@pytest.mark.parametrize("http", SERVERS, indirect=True, ids=["one", "two", "three"])
def test_what_a_member_may_read_holds_no_secret(lab, victim, http):
    """That members read each other's jobs and logs is intended."""
    slice_id = lab.admin.job(victim).slices[0].id
    own_tokens = set(lab.tokens.values()) - {lab.tokens["mal"]}
    for path in (
        f"/jobs/{victim}", f"/jobs/{victim}/why", f"/jobs/{victim}/logs", "/events", "/audit",
        "/secrets", "/users", "/tokens", "/preferences", "/notifications", "/status", "/metrics",
        f"/slices?id={slice_id}", "/inventory", f"/compare?job={victim}", "/budgets",
    ):  # fmt: skip
        answer = http.get(path)
        assert answer.status_code < 500, f"{path}: {answer.text}"
        assert SECRET not in answer.text, path
        assert not any(token in answer.text for token in own_tokens), path
        assert "postgresql://" not in answer.text, path


AGENT_CALLS = (
    ("POST", "/agent/heartbeat"), ("POST", "/agent/logs"), ("GET", "/agent/snapshots/" + "0" * 64),
    ("POST", "/agent/token"), ("PUT", "/agent/results"),
)  # fmt: skip


@pytest.mark.parametrize("http", SERVERS, indirect=True, ids=["one", "two", "three"])
def test_a_member_is_no_agent(http):
    for method, path in AGENT_CALLS:
        assert http.request(method, path, content=b"{}").status_code in (401, 404, 405), path


TRAVERSALS = (
    "/jobs/..%2f..%2ftoken/logs", "/jobs/%2e%2e/%2e%2e/token", "/snapshots/..%2f..%2ftoken",
    "/snapshots/" + "%2e%2e%2f" * 8 + "etc%2fpasswd", "/jobs/a%00b", "/jobs/%ff%fe/logs",
    "/secrets/..%2fKEY", "/../../../etc/passwd", "/../../static/..%2f..%2f..%2fetc/passwd",
    "//etc/passwd", "/jobs/..;/tokens",
)  # fmt: skip


def exchange(lab: Lab, server: int, request: bytes, wait: float = 30.0) -> bytes:
    """Bytes as they are over TLS, until the server closes the connection."""
    parts = urlsplit(lab.servers[server].url)
    context = ssl.create_default_context(cafile=str(lab.ca_file))
    with (
        socket.create_connection((parts.hostname, parts.port), timeout=wait) as plain,
        context.wrap_socket(plain, server_hostname=parts.hostname) as connection,
    ):
        connection.sendall(request)
        answer = b""
        try:
            while data := connection.recv(65536):
                answer += data
        except (ConnectionResetError, TimeoutError, ssl.SSLError):
            return answer
        return answer


@pytest.mark.parametrize("server", SERVERS)
def test_no_path_leads_to_a_file_of_the_server(lab, server):
    for path in TRAVERSALS:
        for prefix in ("/api/v1", ""):
            request = (
                f"GET {prefix}{path} HTTP/1.1\r\nHost: fleet\r\nConnection: close\r\n"
                f"Authorization: Bearer {lab.tokens['mal']}\r\n\r\n"
            )
            answer = exchange(lab, server, request.encode())
            status = int(answer.split()[1])
            page = b"<!doctype html>" in answer.lower()  # the web page, for any path
            assert 400 <= status < 500 or (page and not prefix), (path, answer[:300])
            assert b"root:" not in answer and not TOKEN.search(answer), path


def smuggled(token: str) -> dict[str, bytes]:
    """Requests that a proxy may see as one and the server as two, or the other way round
    (RFC 9112, sections 6 and 11.2). Folded headers and bare line feeds may be read (2.2, 5.2)."""
    auth = f"Host: fleet\r\nAuthorization: Bearer {token}\r\n"
    hidden = f"GET /api/v1/users HTTP/1.1\r\n{auth}\r\n"
    post = f"POST /api/v1/archive HTTP/1.1\r\n{auth}"
    size = len(hidden)
    chunked = "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    heads = {
        "length and chunks": f"Content-Length: {size}\r\n{chunked}",
        "two lengths": f"Content-Length: 0\r\nContent-Length: {size}\r\n\r\n",
        "a list of lengths": f"Content-Length: 0, {size}\r\n\r\n",
        "a signed length": f"Content-Length: +{size}\r\n\r\n",
        "a space before the colon": f"Content-Length : {size}\r\n\r\n",
        "an unknown coding": "Transfer-Encoding: xchunked\r\n\r\n",
        "two codings": "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        "a bare carriage return": "X: y\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "a negative chunk": "Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
        "a chunk with a sign": "Transfer-Encoding: chunked\r\n\r\n+0\r\n\r\n",
        "a null": "X: \0\r\n\r\n",
    }
    return {name: (post + head + hidden).encode() for name, head in heads.items()}


@pytest.mark.parametrize("server", SERVERS)
def test_no_request_hides_in_another(lab, server):
    """The response to the hidden request names the users."""
    for name, request in smuggled(lab.tokens["mal"]).items():
        answer = exchange(lab, server, request)
        statuses = re.findall(rb"HTTP/1\.1 (\d+)", answer)
        assert statuses == [b"400"], (name, answer[:500])
    assert lab.servers[server].client.me().role == "admin", "it still answers others"


def archive(name: str, kind: bytes, target: str = "") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, target
        tar.addfile(member, io.BytesIO(b""))
    return packed.getvalue()


ARCHIVES = {
    "path": archive("../../evil", tarfile.REGTYPE),
    "absolute": archive("/tmp/evil", tarfile.REGTYPE),
    "symbolic link": archive("evil", tarfile.SYMTYPE, "/etc/passwd"),
    "hard link": archive("evil", tarfile.LNKTYPE, "../../token"),
    "device": archive("evil", tarfile.CHRTYPE),
    "fifo": archive("evil", tarfile.FIFOTYPE),
}


@pytest.mark.parametrize("http", SERVERS, indirect=True, ids=["one", "two", "three"])
def test_an_upload_that_leads_out_of_its_folder_is_refused(http):
    for name, content in ARCHIVES.items():
        for digest in ("0" * 64, "..%2f" * 3 + "token"):
            answer = http.put(f"/snapshots/{digest}", content=content)
            assert 400 <= answer.status_code < 500, (name, answer.text)


def test_forged_progress_results_and_lines_harm_nobody(lab, victim):
    job = lab.submit("mal", "forger.py")
    with lab.client("mal") as client:
        client.change_job(job, JobChanges(notes="a\n2026-01-01 ERROR forged-by-mal"))
    lab.wait_for_end(job)
    assert "done" in lab.log(job), lab.describe(job)
    with lab.client("mal") as client, pytest.raises(FleetError):
        client.result(job)  # it is a link out of its folder
    assert lab.admin.job(victim).job.state == "running"
    for server in lab.servers:
        ready = httpx.get(f"{server.url}/readyz", verify=False, timeout=900, trust_env=False)
        assert ready.status_code == 200
        lines = (server.home / "server.log").read_text().splitlines()
        assert not [line for line in lines if line.startswith("2026-01-01")]
    after = lab.submit("vic", "-c", "print('still works')")
    lab.wait_for_end(after)
    assert "still works" in lab.log(after), lab.describe(after)


def test_a_revoked_token_and_what_it_created_end_on_every_server_with_their_streams(lab, victim):
    """It is revoked on one server, and was used on the others."""
    stolen = lab.admin.create_token(user="mal")
    with FleetClient(lab.servers[1].url, stolen.token, ca_file=lab.ca_file) as client:
        child = client.create_token()
    ended: dict[str, float] = {}

    def follow(name: str, server: int, path: str, token: str) -> None:
        context = ssl.create_default_context(cafile=str(lab.ca_file))
        url = f"{lab.servers[server].url}/api/v1{path}"
        headers = {"Authorization": f"Bearer {token}"}
        with (
            httpx.Client(verify=context, trust_env=False, timeout=120) as http,
            http.stream("GET", url, headers=headers) as response,
        ):
            assert response.status_code == 200, response.read()
            opened.append(name)
            with contextlib.suppress(httpx.RemoteProtocolError):
                for _ in response.iter_bytes():
                    pass
        ended[name] = time.monotonic()

    opened: list[str] = []
    streams = [
        threading.Thread(target=follow, args=(f"{path} {server}", server, path, token), daemon=True)
        for server in SERVERS
        for path, token in (
            ("/stream", stolen.token),
            (f"/jobs/{victim}/logs/stream", child.token),
        )
    ]
    for stream in streams:
        stream.start()
    wait_until(lambda: len(opened) == len(streams), 60, lambda: opened)
    assert not ended
    lab.servers[2].client.revoke_token(stolen.id)
    for server in lab.servers:
        for token in (stolen.token, child.token):
            with (
                FleetClient(server.url, token, ca_file=lab.ca_file) as client,
                pytest.raises(Unauthorized),
            ):
                client.me()
    wait_until(lambda: len(ended) == len(streams), STREAM_ENDS_WITHIN, lambda: json.dumps(ended))

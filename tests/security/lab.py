"""Three servers behind TLS on one Postgres, an administrator, and two members who share simulated
slices: one is hostile."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import postgres
from tests.certificates import make_certificate
from tests.chaos.load_balancer import LoadBalancer
from tests.polling import wait_until
from tests.server_process import Server
from tpufleet.client import snapshots
from tpufleet.client.fleet import FleetClient, new_job_id
from tpufleet.model.api_types import NewJob
from tpufleet.model.job.jobs import JobId
from tpufleet.model.people.users import Role

PROGRAMS = Path(__file__).parent
SECRET = "-".join(("of", "the", "victim", "5f2b"))  # this file does not contain it


class Lab:
    def __init__(self, folder: Path) -> None:
        self.balancer = LoadBalancer(rotate=True)
        certificate = make_certificate(folder)
        self.ca_file = certificate.cert
        self.data = folder / "data"
        settings = {
            "TPUFLEET_STORE": postgres.fresh_url(),
            "TPUFLEET_DATA": str(self.data),
            "TPUFLEET_PROVIDERS": "local",
            "TPUFLEET_TLS_CERT": str(certificate.cert),
            "TPUFLEET_TLS_KEY": str(certificate.key),
            "TPUFLEET_CA_FILE": str(certificate.cert),
            "TPUFLEET_PUBLIC_URL": self.balancer.url.replace("http://", "https://"),
        }
        self.servers = [Server(folder / name, **settings) for name in ("one", "two", "three")]
        self.balancer.servers = self.servers
        self.tokens: dict[str, str] = {}

    def start(self) -> None:
        for server in self.servers:
            server.start()
        for name in ("vic", "mal"):
            self.admin.put_user(name, Role.MEMBER)
            self.tokens[name] = self.admin.create_token(user=name).token

    @property
    def admin(self) -> FleetClient:
        return self.servers[0].client

    @contextmanager
    def client(self, name: str, server: int = 0) -> Iterator[FleetClient]:
        with FleetClient(
            self.servers[server].url, self.tokens[name], ca_file=self.ca_file, timeout=60
        ) as client:
            yield client

    def submit(self, name: str, *command: str, **fields: object) -> JobId:
        scanned = snapshots.scan(PROGRAMS)
        packed = io.BytesIO()
        snapshots.pack(scanned, packed)
        job = new_job_id()
        spec = {
            "name": f"job-of-{name}-{job}", "command": [sys.executable, *command],
            "accelerator": "v5e-4", "grace": "1s", "retries": {"failure": 0}, **fields,
        }  # fmt: skip
        with self.client(name) as client:
            if not client.has_snapshot(scanned.digest):
                client.put_snapshot(scanned.digest, packed.getvalue())
            client.submit([NewJob(id=job, spec=spec, snapshot=scanned.digest)])
        return job

    def log(self, job: str) -> str:
        return "".join(self.admin.logs(job))

    def wait_for_line(self, job: str, line: str) -> None:
        wait_until(lambda: line in self.log(job), 300, lambda: self.describe(job))

    def wait_for_state(self, job: str, state: str) -> None:
        reached = lambda: self.admin.job(job).job.state == state
        wait_until(reached, 300, lambda: self.describe(job))

    def wait_for_end(self, job: str) -> None:
        wait_until(lambda: self.admin.job(job).job.ended, 300, lambda: self.describe(job))

    def describe(self, job: str) -> str:
        row = self.admin.job(job).job
        return f"{row.state}: {row.reason}\n{self.log(job)}\n{self.servers[0].log_tail()}"

    def cleanup(self) -> None:
        self.balancer.close()
        for server in self.servers:
            server.cleanup()

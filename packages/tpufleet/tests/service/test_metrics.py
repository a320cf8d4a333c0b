"""Metrics, probes, and the alerts and the dashboard that use them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import timedelta

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.journeys.faulty_store import FaultyStore
from tests.repository import ROOT
from tests.service.harness import ServiceHarness
from tests.service.test_token_scopes import limited
from tpufleet.model.fleet.hosts import HostLiveness, Progress
from tpufleet.model.fleet.pools import CapacityRefusal
from tpufleet.model.fleet.server_status import (
    CONTROLLER_REPORT,
    ControllerReport,
    ProviderHealth,
    ProviderProblem,
)
from tpufleet.model.job.attempts import AttemptState, Startup
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import Capacity, JobState
from tpufleet.model.people.users import TokenScope
from tpufleet.model.values import encoding
from tpufleet.service.operations import metrics
from tpufleet.stores.base import ChangeSet
from tpufleet.stores.memory import MemoryStore

MONITORING = ROOT / "deploy" / "monitoring"
SECOND = timedelta(seconds=1)


def scrape(service: ServiceHarness, user: str = "vic") -> dict[tuple[str, frozenset], float]:
    """Sample name and labels → value."""
    service.clock.advance(metrics.CACHE_SECONDS * SECOND)
    with service.http(service.tokens[user]) as http:
        answer = http.get(service.url + "/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(samples, sample: str, /, **labels: str) -> float | None:
    found = [
        number for (each, known), number in samples.items()
        if each == sample and set(labels.items()) <= known
    ]  # fmt: skip
    return found[0] if found else None


def fill(service: ServiceHarness) -> None:
    """Something of every kind."""
    now = service.clock.now()
    service.submit("job-1", name="train")
    service.change_job("job-1", state=JobState.RUNNING)
    service.submit("job-2")
    service.submit("job-3")
    service.end_job("job-3")
    service.add_slice("s1", "job-1")
    service.add_attempt("job-1", 0, "s1")
    progress = Progress(step=30, total=100, at=now)
    service.store.record_heartbeats(
        [HostLiveness(host_id="s1/0", seen_at=now, attempt_id="job-1.0", progress=progress)]
    )
    problem = ProviderProblem(call="request", message="quota", since=now, last_at=now)
    health = ProviderHealth(name="tpu-vm", answered_at=now, problems=(problem,))
    report = ControllerReport(holder="h", leader_since=now, reported_at=now, providers=(health,))
    service.store.put_metadata(CONTROLLER_REPORT, encoding.to_json(report).decode())
    refusal = CapacityRefusal(
        provider="tpu-vm", zone="us-east5-a", accelerator="v5litepod-16", capacity=Capacity.SPOT,
        message="out", refused_at=now, until=now + timedelta(hours=1),
    )  # fmt: skip
    service.store.commit(ChangeSet(refusals=[refusal]))


def test_the_fleet_and_its_live_jobs_are_exported(service):
    fill(service)
    samples = scrape(service)
    assert value(samples, "tpufleet_jobs", state="running") == 1
    assert value(samples, "tpufleet_jobs", state="failed") == 1
    assert value(samples, "tpufleet_slices", provider="local", state="ready") == 1
    assert value(samples, "tpufleet_chips", accelerator="v5litepod-16") == 16
    assert value(samples, "tpufleet_running_chips", accelerator="v5litepod-16") == 16
    assert value(samples, "tpufleet_hosts") == 1
    assert value(samples, "tpufleet_controller_up") == 1
    assert value(samples, "tpufleet_provider_problems", provider="tpu-vm", call="request") == 1
    assert value(samples, "tpufleet_provider_problems", provider="tpu-vm", call="listing") == 0
    assert value(samples, "tpufleet_capacity_refusals", zone="us-east5-a") == 1
    assert value(samples, "tpufleet_oldest_queued_seconds") == metrics.CACHE_SECONDS
    job = {"job_id": "job-1", "name": "train", "owner": "mel"}
    assert value(samples, "tpufleet_job_info", **job, state="running") == 1
    assert value(samples, "tpufleet_job_step", **job) == 30
    assert value(samples, "tpufleet_job_steps", **job) == 100
    assert value(samples, "tpufleet_job_attempts", **job) == 1
    assert value(samples, "tpufleet_job_info", job_id="job-3") is None
    assert (
        value(samples, "tpufleet_http_requests_total", operation="submit_jobs", status="200") == 3
    )
    service.clock.advance(timedelta(hours=1))
    assert value(scrape(service), "tpufleet_controller_up") == 0


def test_the_number_of_series_is_bounded(service):
    spec = {"name": "x", "command": ["true"], "accelerator": "v5litepod-16"}
    with service.http(service.tokens["mel"]) as http:
        jobs = [{"id": f"job-{number}", "spec": spec} for number in range(2_000)]
        assert http.post("/jobs", json={"jobs": jobs}, timeout=900).status_code == 200
    samples = scrape(service)
    assert len(samples) < 3 * metrics.MAX_JOBS
    assert value(samples, "tpufleet_jobs_left_out") == 2_000 - metrics.MAX_JOBS
    assert value(samples, "tpufleet_jobs", state="queued") == 2_000
    # Goodput is that of the whole fleet, and not of the jobs with series of their own.
    started = [replace(job, state=JobState.RUNNING) for job in service.store.live().jobs]
    service.store.commit(ChangeSet(jobs=started))
    samples = scrape(service)
    assert value(samples, "tpufleet_running_chips", accelerator="v5litepod-16") == 2_000 * 16


def test_metrics_need_a_token_and_a_read_only_one_is_enough(service):
    with service.http() as http:
        assert http.get(service.url + "/metrics").status_code == 401
    limited(service, "vic", scope=TokenScope.READ)
    assert scrape(service, "limited")


def test_every_metric_of_the_alerts_and_the_dashboard_is_exported(service):
    fill(service)
    service.send_heartbeat("s1/0")
    exported = {name for name, _ in scrape(service)}
    exported |= {name for name, _ in scrape(service)}  # requests count once they were answered
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
    board = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    expressions = [rule["expr"] for rule in rules]
    expressions += [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    used = {name for text in expressions for name in re.findall(r"\btpufleet_\w+", text)}
    assert len(rules) >= 5 and len(board["panels"]) >= 10
    assert used - exported == set()
    labels = {label for name, known in scrape(service) for label, _ in known} | {"le"}
    grouped = {
        label.strip()
        for text in expressions
        for group in re.findall(r"\bby \(([^)]*)\)", text)
        for label in group.split(",")
    }
    assert grouped - labels == set()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_probes_need_no_token(service, path):
    with service.http() as http:
        answer = http.get(service.url + path)
    assert (answer.status_code, answer.text) == (200, "ok\n")


def test_a_server_without_its_database_is_healthy_but_not_ready(tmp_path):
    store = FaultyStore(MemoryStore())
    service = ServiceHarness(store, tmp_path)
    service.start()
    store.fails = lambda name, number: "before"
    try:
        with service.http() as http:
            for _ in range(2):
                answer = http.get(service.url + "/readyz")
                assert answer.status_code == 503
                assert answer.text == "the database does not respond\n"
                assert int(answer.headers["Retry-After"]) > 0
            token = {"Authorization": f"Bearer {service.tokens['ada']}"}
            answer = http.get(service.url + "/api/v1/status", headers=token)
            assert answer.status_code == 503 and int(answer.headers["Retry-After"]) > 0
            message = answer.json()["error"]["message"]
            assert message == "the database does not respond; retry"
            assert http.get(service.url + "/healthz").status_code == 200
            store.fails = lambda name, number: None
            service.clock.advance(3 * SECOND)
            assert http.get(service.url + "/readyz").status_code == 200
    finally:
        store.fails = lambda name, number: None
        service.close()


def test_each_recovery_is_counted_once_with_its_reason(service: ServiceHarness):
    service.submit("job-1")
    now = service.clock.now()
    failed = service.add_attempt("job-1", 0, "s1")
    failed = replace(
        failed, state=AttemptState.ENDED, end_reason=EndReason.PREEMPTED,
        fault_at=now, stopping_at=now, ended_at=now,
    )  # fmt: skip
    service.clock.advance(8 * SECOND)
    then = service.clock.now()
    startup = Startup(assigned_at=then, started_at=then, stepped_at=then, advanced_at=then)
    live = replace(service.add_attempt("job-1", 1, "s1"), startup=startup)
    service.store.commit(ChangeSet(attempts=[failed, live]))
    own = metrics.ServerMetrics(service.store, service.clock, service.folder)
    own.count_recoveries([failed, live])
    own.count_recoveries([live])
    own.count_recoveries([replace(live, state=AttemptState.ENDED)])
    text = own.text().decode()
    assert 'tpufleet_recovery_seconds_count{reason="preempted"} 1.0' in text
    assert 'tpufleet_recovery_seconds_sum{reason="preempted"} 8.0' in text

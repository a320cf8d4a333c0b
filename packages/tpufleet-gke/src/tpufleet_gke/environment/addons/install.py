"""Installs the add-ons of an environment with kubectl, at pinned versions, and checks them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from tpufleet.errors import FleetError
from tpufleet.model.fleet.preflight import Check, failed, ok
from tpufleet_gke.environment.addons import queues, team_manifests
from tpufleet_gke.environment.config import checks as config_checks
from tpufleet_gke.environment.config import names
from tpufleet_gke.environment.config.sections import Environment

MANAGER = "tpufleet-environment"
WAIT = "300s"
ATTEMPTS = 10  # webhooks answer some seconds after their Deployment is available
SECONDS_BETWEEN = 3.0
# https://github.com/kubernetes-sigs/kueue/issues/13957: it no longer serves v1beta1, and the next
# one cannot be installed while an object may be stored as v1beta1.
KUEUE_WITHOUT_V1BETA1 = (0, 20)
KUEUE_GROUP = "kueue.x-k8s.io"
CALLING_WEBHOOK = "failed calling webhook"
INSTALL = "`tpu cluster install`"


class AddOnFailed(FleetError):
    """kubectl rejected a manifest, or an add-on did not become ready."""


class WebhookUnavailable(AddOnFailed):
    """A webhook of the cluster did not answer kubectl, such as one that has just been installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AddOn:
    name: str
    url: str
    namespace: str
    deployment: str
    version: str


def addons(environment: Environment) -> list[AddOn]:
    """In the order of installation."""
    versions = environment.addons
    sigs = "https://github.com/kubernetes-sigs"
    return [
        AddOn(
            name="cert-manager", version=versions.cert_manager, namespace="cert-manager",
            deployment="cert-manager-webhook",
            url="https://github.com/cert-manager/cert-manager/releases/download/"
            f"{versions.cert_manager}/cert-manager.yaml",
        ),
        AddOn(
            name="JobSet", version=versions.jobset, namespace="jobset-system",
            deployment="jobset-controller-manager",
            url=f"{sigs}/jobset/releases/download/{versions.jobset}/manifests.yaml",
        ),
        AddOn(
            name="Kueue", version=versions.kueue, namespace="kueue-system",
            deployment="kueue-controller-manager",
            url=f"{sigs}/kueue/releases/download/{versions.kueue}/manifests.yaml",
        ),
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Kubectl:
    command: Sequence[str] = ("kubectl",)
    environ: Mapping[str, str] | None = None
    sleep: Callable[[float], None] = time.sleep

    def run(self, *args: str, stdin: str = "") -> str:
        done = subprocess.run(
            [*self.command, *args], input=stdin, env=dict(self.environ or os.environ),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            error = WebhookUnavailable if CALLING_WEBHOOK in done.stderr else AddOnFailed
            raise error(f"kubectl {args[0]} failed\n  {done.stderr.strip()}")
        return done.stdout

    def apply(self, documents: Sequence[Mapping[str, Any]]) -> None:
        """Server-side; repeated while a webhook does not answer yet."""
        text = yaml.safe_dump_all(documents, sort_keys=False)
        for attempt in range(ATTEMPTS):
            try:
                self.run(
                    "apply", "--server-side", "--force-conflicts", f"--field-manager={MANAGER}",
                    "-f", "-", stdin=text,
                )  # fmt: skip
                return
            except WebhookUnavailable:
                if attempt == ATTEMPTS - 1:
                    raise
                self.sleep(SECONDS_BETWEEN)

    def read(self, *args: str) -> Any:
        return json.loads(self.run("get", *args, "-o", "json"))


def install(environment: Environment, kubectl: Kubectl, report: Callable[[str], None]) -> None:
    """Add-ons, then what depends on them. Can be repeated."""
    _require_cluster(environment, kubectl)
    problem, following = _stored_versions(environment, kubectl)
    if problem:
        raise AddOnFailed(f"{problem}\n  next: {following}")
    for addon in addons(environment):
        kubectl.run("apply", "--server-side", "--force-conflicts", "-f", addon.url)
        kubectl.run(
            "wait", "--for=condition=Available", f"--timeout={WAIT}", "-n", addon.namespace,
            f"deployment/{addon.deployment}",
        )  # fmt: skip
        report(f"{addon.name} {addon.version} is available")
    _apply_queues(environment, kubectl, report)


def apply_queues(environment: Environment, kubectl: Kubectl, report: Callable[[str], None]) -> None:
    _require_cluster(environment, kubectl)
    _apply_queues(environment, kubectl, report)


def _apply_queues(
    environment: Environment, kubectl: Kubectl, report: Callable[[str], None]
) -> None:
    kubectl.apply(team_manifests.teams(environment))
    kubectl.apply(queues.manifests(environment))
    report(f"queues of {', '.join(environment.teams)} are applied")


def checks(environment: Environment, kubectl: Kubectl) -> list[Check]:
    """What is there, against what cluster.yaml says."""
    problem = _cluster_problem(environment, kubectl)
    if problem:
        return [failed("cluster", problem, login_command(environment))]
    found = [_addon_check(addon, kubectl) for addon in addons(environment)]
    problem, following = _stored_versions(environment, kubectl)
    if problem:
        found.append(failed("Kueue objects", problem, following))
    return found + [_queue_check(name, environment, kubectl) for name in environment.teams]


def _require_cluster(environment: Environment, kubectl: Kubectl) -> None:
    problem = _cluster_problem(environment, kubectl)
    if problem:
        raise AddOnFailed(f"{problem}\n  next: {login_command(environment)}")


def _cluster_problem(environment: Environment, kubectl: Kubectl) -> str:
    """Why kubectl does not lead to the cluster of this environment; empty when it does. Only
    contexts that gcloud wrote name their cluster."""
    try:
        context = kubectl.run("config", "current-context").strip()
    except AddOnFailed:
        context = ""  # none is set: the service account of a pod, say
    expected = f"gke_{environment.project}_{environment.region}_{names.cluster(environment)}"
    if context.startswith("gke_") and context != expected:
        return f"kubectl's context is {context}, not {expected}"
    try:
        kubectl.run("get", "--raw", "/readyz")
    except AddOnFailed as error:
        return _last_line(error)
    return ""


def _stored_versions(environment: Environment, kubectl: Kubectl) -> tuple[str, str]:
    """Why Kueue cannot be upgraded to this version, and what to do first; empty if it can."""
    if config_checks.kueue_version(environment) < KUEUE_WITHOUT_V1BETA1:
        return "", ""
    crds = [
        crd["metadata"]["name"]
        for crd in kubectl.read("customresourcedefinitions")["items"]
        if crd["spec"]["group"] == KUEUE_GROUP
        and "v1beta1" in crd.get("status", {}).get("storedVersions", [])
    ]
    if not crds:
        return "", ""
    change = json.dumps({"status": {"storedVersions": ["v1beta2"]}})
    return (
        f"Kueue {environment.addons.kueue} cannot be installed: objects may be stored as v1beta1 "
        f"({', '.join(crds)})",
        "run hack/migrate-to-v1beta2.sh of the installed Kueue, then `kubectl patch crd "
        f"{' '.join(crds)} --subresource=status --type=merge --patch='{change}'`, then this again",
    )


def login_command(environment: Environment) -> str:
    return (
        f"`gcloud container clusters get-credentials {names.cluster(environment)} "
        f"--region {environment.region} --project {environment.project}`"
    )


def _addon_check(addon: AddOn, kubectl: Kubectl) -> Check:
    try:
        deployment = kubectl.read("deployment", addon.deployment, "-n", addon.namespace)
    except AddOnFailed as error:
        return failed(addon.name, _last_line(error), INSTALL)
    images = [item["image"] for item in deployment["spec"]["template"]["spec"]["containers"]]
    ready = deployment.get("status", {}).get("availableReplicas", 0)
    pinned = any(image.endswith(f":{addon.version}") for image in images)
    message = f"{ready} available, {', '.join(images)}"
    if ready and pinned:
        return ok(addon.name, message)
    return failed(addon.name, message, f"{INSTALL} installs {addon.version}")


def _queue_check(name: str, environment: Environment, kubectl: Kubectl) -> Check:
    team = environment.teams[name]
    title = f"queue {team.queue} of {name}"
    try:
        queue = kubectl.read("clusterqueues.kueue.x-k8s.io", queues.queue_name(name))
        kubectl.read(
            "localqueues.kueue.x-k8s.io", team.queue, "-n", names.team_namespace(name, team)
        )
    except AddOnFailed as error:
        return failed(title, _last_line(error), INSTALL)
    conditions = {item["type"]: item for item in queue.get("status", {}).get("conditions", [])}
    active = conditions.get("Active", {})
    message = active.get("message", "no status yet")
    return ok(title, message) if active.get("status") == "True" else failed(title, message, "")


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip()

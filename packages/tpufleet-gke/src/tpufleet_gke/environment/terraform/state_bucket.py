"""Creates the bucket of Terraform state with gcloud, before the first stage can use it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

from tpufleet.errors import BadInput, FleetError
from tpufleet_gke.environment.config import names
from tpufleet_gke.environment.config.sections import Environment

NOT_FOUND = ("404", "not found", "does not exist")


class StateBucketFailed(FleetError):
    """gcloud could not read or create the bucket."""


def exists(environment: Environment) -> bool:
    if shutil.which("gcloud") is None:
        raise BadInput(
            "gcloud not found; it creates the bucket of Terraform state\n"
            "  next: install the Google Cloud CLI and run `gcloud auth application-default login`, "
            "or rehearse without an account: --rehearse"
        )
    url = _url(environment)
    described = _gcloud("describe", url, f"--project={environment.project}")
    if described.returncode == 0:
        return True
    if not any(text in described.stderr.lower() for text in NOT_FOUND):
        raise StateBucketFailed(_message("cannot read", url, described.stderr))
    return False


def ensure(environment: Environment, report: Callable[[str], None]) -> None:
    """Does nothing where the bucket exists."""
    if exists(environment):
        return
    url, project = _url(environment), f"--project={environment.project}"
    if not environment.automation.create_bucket:
        raise BadInput(
            f"automation.bucket: {url} does not exist\n"
            "  next: create it, or write automation.create_bucket: true"
        )
    location = environment.automation.location or environment.region
    created = _gcloud(
        "create", url, project, f"--location={location}", "--uniform-bucket-level-access",
        "--public-access-prevention",
    )  # fmt: skip
    if created.returncode:
        raise StateBucketFailed(_message("cannot create", url, created.stderr))
    report(f"created {url} for Terraform state")


def _url(environment: Environment) -> str:
    return f"gs://{names.automation_bucket(environment)}"


def _gcloud(verb: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["gcloud", "storage", "buckets", verb, *args, "--quiet"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def _message(what: str, url: str, output: str) -> str:
    evidence = "\n".join(f"  {line}" for line in output.strip().splitlines()[-4:])
    return (
        f"{what} {url}\n{evidence}\n"
        "  next: `gcloud auth login`, or ask for the role roles/storage.admin on the project"
    )

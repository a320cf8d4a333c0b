"""Cloud Build pipelines: the YAML files in this folder, with the names of an environment.

They run as the automation service account, so no one needs to impersonate it.
"""

from __future__ import annotations

import re
from pathlib import Path

from tpufleet import __version__
from tpufleet_gke.environment.addons import install
from tpufleet_gke.environment.config import names
from tpufleet_gke.environment.config.sections import Environment
from tpufleet_gke.environment.terraform.versions import OPENTOFU_VERSION

HEADER = "# Generated from cluster.yaml by `tpu cluster render`; edit that file instead.\n"
CLOUD_SDK = "gcr.io/google.com/cloudsdktool/google-cloud-cli:532.0.0"  # gcloud and kubectl
RENDERED = "rendered"  # folder of `tpu cluster render`, which provision.yaml names


def files(environment: Environment) -> dict[str, str]:
    values = {
        "opentofu": f"ghcr.io/opentofu/opentofu:{OPENTOFU_VERSION}",
        "cloud_sdk": CLOUD_SDK,
        "project": environment.project,
        "region": environment.region,
        "cluster": names.cluster(environment),
        "bucket": names.automation_bucket(environment),
        "account": names.account_email(environment, environment.automation.service_account),
        "images": names.image_path(environment),
        "version": __version__,
        **{addon.name.lower(): addon.url for addon in install.addons(environment)},
    }
    templates = sorted(Path(__file__).parent.glob("*.yaml"))
    return {
        path.name: HEADER + re.sub(r"@([a-z_-]+)@", lambda m: values[m[1]], path.read_text())
        for path in templates
    }

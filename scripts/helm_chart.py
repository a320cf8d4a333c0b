"""Generate deploy/helm/tpufleet from deploy/k8s/overlays/gke, so that both stay the same.

    python scripts/helm_chart.py --write     # after a change of deploy/k8s

The manifests are those that kustomize renders, with placeholders replaced by values.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
OVERLAY = ROOT / "deploy/k8s/overlays/gke"
WITH_BRIDGE = ROOT / "deploy/k8s/overlays/gke-bridge"
# For the Prometheus operator; installed where the cluster knows its kinds.
MONITORING = ROOT / "deploy/k8s/base/provisioner/monitoring"
BRIDGE_MONITORING = ROOT / "deploy/k8s/base/bridge/monitoring"
MONITORING_API = "monitoring.coreos.com/v1"
BRIDGE = "tpufleet-bridge"  # all of its objects; installed where it has replicas
CHART = ROOT / "deploy/helm/tpufleet"
IMAGE = "us-docker.pkg.dev/PROJECT/tpufleet/tpufleet:0.1.0"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
ACCOUNTS = {
    "server": "tpufleet",
    "provisioner": "tpu-provisioner",
    "bridge": "tpufleet-bridge",
}
# Deployment → its key below `replicas`.
REPLICAS = {
    "tpufleet": "server",
    "tpu-provisioner-controller-manager": "provisioner",
    "admission-controller": "admission",
    "tpufleet-bridge": "bridge",
}
# Text of the manifests → template. Longer texts first.
SUBSTITUTIONS = (
    (IMAGE, "{{ .Values.image }}"),
    *(
        (f"{account}@PROJECT.iam.gserviceaccount.com", f"{{{{ .Values.serviceAccounts.{key} }}}}")
        for key, account in sorted(ACCOUNTS.items(), key=lambda item: -len(item[1]))
    ),
    ("_ZONES: us-central1-a", '_ZONES: {{ join "," .Values.zones | quote }}'),
    ("gs://PROJECT-tpufleet", "{{ .Values.bucket }}"),
    (": PROJECT", ": {{ .Values.project }}"),
)
# kustomize names settings after their content, so that a change restarts pods; so does the chart.
SETTINGS_NAME = re.compile(r"\btpufleet-settings-[0-9a-z]{10}\b")
SETTINGS_TEMPLATE = "tpufleet-settings-{{ toJson .Values | sha256sum | trunc 10 }}"
MORE_SETTINGS = """\
{{- range $name, $value := .Values.settings }}
  {{ $name }}: {{ $value | quote }}
{{- end }}
"""
PROVISIONER_SETTINGS = MORE_SETTINGS.replace(".Values.settings", ".Values.provisioner")
BRIDGE_OPTIONS = """\
{{- range .Values.bridge }}
        - {{ . | quote }}
{{- end }}
"""
CHECKSUM = """\
      annotations:
        checksum/settings: {{ toJson .Values | sha256sum }}
"""
VALUES = f"""\
# Values of the chart. `tpu cluster render` writes those of a cluster.yaml.

# Google Cloud project id.
project: PROJECT

# Image of the server, the provisioner, the bridge and the pods of jobs.
image: {IMAGE}

# Where the server keeps code, logs, results and checkpoints. The Secrets tpufleet-store and
# tpufleet-secret are described in docs/kubernetes.md#deploying.
bucket: gs://PROJECT-tpufleet

# Zones of slices.
zones: [us-central1-a]

# Google service accounts, used through Workload Identity.
serviceAccounts:
  server: tpufleet@PROJECT.iam.gserviceaccount.com
  provisioner: tpu-provisioner@PROJECT.iam.gserviceaccount.com
  bridge: tpufleet-bridge@PROJECT.iam.gserviceaccount.com

# Other settings of the server, as environment variables; docs/server-reference.md and
# docs/kubernetes.md list them. For example TPUFLEET_GKE_QUEUE: lab.
settings: {{}}

# Other settings of the provisioner, as environment variables; docs/provisioner.md lists them. For
# example BUDGET_CHIPS: "512, team-a=64", WARM_POOL_TTL: 10m.
provisioner: {{}}

# Options of the Firestore bridge, which runs where it has replicas. docs/firestore.md has the
# Secret that it needs.
bridge: [--accelerator=v5e-1]

# Replicas of each Deployment.
replicas:
"""


class BlockDumper(yaml.SafeDumper):
    """Writes text of several lines as a block, where expressions need no quoting."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


BlockDumper.add_representer(str, _text)


def rendered(
    kubectl: Sequence[str] = ("kubectl",),
    overlays: Sequence[Path] = (WITH_BRIDGE, MONITORING, BRIDGE_MONITORING),
) -> list[dict[str, Any]]:
    """What kustomize makes of the overlays."""
    text = "---\n".join(
        subprocess.run(
            [*kubectl, "kustomize", str(overlay)], capture_output=True, text=True, check=True
        ).stdout
        for overlay in overlays
    )
    return [document for document in yaml.load_all(text, Loader=LOADER) if document]


def template(document: dict[str, Any]) -> str:
    """One manifest as a Helm template."""
    text = yaml.dump(document, Dumper=BlockDumper, sort_keys=False, width=1000)
    text = re.sub(r"\{\{(.*?)\}\}", r"{{ `{{\1}}` }}", text)  # alerts have templates of their own
    text = SETTINGS_NAME.sub(SETTINGS_TEMPLATE, text)
    for plain, expression in SUBSTITUTIONS:
        text = text.replace(plain, expression)
    name = document["metadata"]["name"]
    if SETTINGS_NAME.fullmatch(name):
        text = text.replace("\nkind: ConfigMap\n", f"\n{MORE_SETTINGS}kind: ConfigMap\n", 1)
    if document["kind"] == "ConfigMap" and name == "manager":
        text = text.replace("\nkind: ConfigMap\n", f"\n{PROVISIONER_SETTINGS}kind: ConfigMap\n", 1)
    if name == "tpu-provisioner-controller-manager" and document["kind"] == "Deployment":
        start = "  template:\n    metadata:\n"
        text = text.replace(start, start + CHECKSUM, 1)
    if document["kind"] == "Deployment" and name in REPLICAS:
        replicas = document["spec"]["replicas"]
        expression = f"replicas: {{{{ .Values.replicas.{REPLICAS[name]} }}}}"
        text = text.replace(f"replicas: {replicas}", expression, 1)
    conditions = []
    if name == BRIDGE:
        text = text.replace("        - --accelerator=v5e-1\n", BRIDGE_OPTIONS)
        conditions.append(".Values.replicas.bridge")
    if document["apiVersion"] == MONITORING_API:
        conditions.append(f'(.Capabilities.APIVersions.Has "{MONITORING_API}")')
    if conditions:
        text = f"{{{{- if and {' '.join(conditions)} }}}}\n{text}{{{{- end }}}}\n"
    return text


def files(documents: Sequence[dict[str, Any]]) -> dict[str, str]:
    version = re.search(
        r'__version__ = "([^"]+)"',
        (ROOT / "packages/tpufleet/src/tpufleet/__init__.py").read_text(),
    )
    assert version
    chart = {
        "apiVersion": "v2",
        "name": "tpufleet",
        "description": "Runs JAX jobs on Cloud TPUs: server, provisioner, webhook and bridge.",
        "type": "application",
        "version": version[1],
        "appVersion": version[1],
    }
    replicas = {
        REPLICAS[document["metadata"]["name"]]: document["spec"]["replicas"]
        for document in documents
        if document["kind"] == "Deployment" and document["metadata"]["name"] in REPLICAS
    }
    replicas["bridge"] = 0
    counts = "".join(f"  {name}: {count}\n" for name, count in sorted(replicas.items()))
    parts: dict[str, list[str]] = {}
    for document in documents:
        namespace = document["metadata"].get("namespace") or "cluster"
        parts.setdefault(f"templates/{namespace}.yaml", []).append(template(document))
    return {
        "Chart.yaml": yaml.safe_dump(chart, sort_keys=False),
        "values.yaml": VALUES + counts,
        **{name: "---\n".join(texts) for name, texts in parts.items()},
    }


def main() -> None:
    generated = files(rendered())
    if "--write" not in sys.argv:
        print("\n".join(generated))
        return
    for old in CHART.rglob("*.yaml"):
        old.unlink()
    for name, text in generated.items():
        path = CHART / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    print(f"{CHART}: {len(generated)} files")


if __name__ == "__main__":
    main()

"""`tpu deploy`: the server on a VM, or a kustomize overlay that runs tpufleet on GKE."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

import click

import tpufleet
from tpufleet import config
from tpufleet.errors import BadInput
from tpufleet.model.fleet import fleets
from tpufleet.model.people.users import TOKEN_PREFIX
from tpufleet.model.values import names
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.operators.bundle import bundle
from tpufleet.views.cli.operators.deploy_server import server
from tpufleet.views.cli.output import example, json_option

MANIFESTS = Path(tpufleet.__file__).parent / "deploy" / "k8s"
TEMPLATE = MANIFESTS / "overlays" / "gke"
COPIED = "k8s"  # folder of the overlay
PLACEHOLDER = "PROJECT"
PROJECT_NAME = "GOOGLE_CLOUD_PROJECT"  # the setting
SECRET_GENERATOR = """secretGenerator:
  - name: tpufleet-store
    namespace: tpufleet-system
    files: [url=secrets/store-url]
  - name: tpufleet-secret
    namespace: tpufleet-system
    files: [secret=secrets/secret, admin-token=secrets/admin-token]
"""


@click.group(epilog=example("tpu deploy server --dry-run"))
def deploy() -> None:
    """Run the server on a VM of the cloud project, or tpufleet on GKE."""


deploy.add_command(server)
deploy.add_command(bundle)


@deploy.command(
    epilog="\b\nExample:\n  tpu deploy init my-fleet --project my-project --zone us-central1-a "
    "--store postgresql://fleet@10.1.2.3/fleet\n"
)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--project", required=True, metavar="PROJECT", help="Google Cloud project.")
@click.option(
    "--zone", "zones", multiple=True, required=True, metavar="ZONE",
    help="Zone of slices; repeatable, tried in order.",
)  # fmt: skip
@click.option(
    "--store", metavar="URL",
    help="Postgres of the servers (default: TPUFLEET_STORE). Written to a file of mode 600.",
)  # fmt: skip
@click.option("--bucket", metavar="URL", help="Bucket (default: gs://PROJECT-tpufleet).")
@click.option("--image", metavar="IMAGE", help="Image (default: in the project's registry).")
@json_option
def init(
    folder: Path,
    project: str,
    zones: tuple[str, ...],
    store: str | None,
    bucket: str | None,
    image: str | None,
) -> None:
    """Write a kustomize overlay with your values, and generate its secrets.

    Secrets, settings and an edited kustomization.yaml in FOLDER are kept, so the command can be
    repeated with other values. The manifests in FOLDER/k8s are those of this version.
    """
    store = store or connection.settings().store
    if not (store or "").startswith(("postgresql://", "postgres://")):
        raise BadInput(
            "no Postgres: replicas share one database\n"
            "  next: pass --store postgresql://USER:PASSWORD@HOST/DATABASE, or set TPUFLEET_STORE"
        )
    config.checked(fleets.check_project, project, "--project")
    for zone in zones:
        if error := names.zone_error(zone):
            raise BadInput(f"--zone: {error}")
    values = {"TPUFLEET_GKE_ZONES": ",".join(zones)}
    if bucket is not None:
        values["TPUFLEET_BUCKET"] = bucket
    if image is not None:
        values["TPUFLEET_GKE_IMAGE"] = image
    folder.mkdir(parents=True, exist_ok=True)
    overlay, settings = folder / "kustomization.yaml", folder / "settings.env"
    shutil.copytree(MANIFESTS, folder / COPIED, dirs_exist_ok=True)
    template = (TEMPLATE / "kustomization.yaml").read_text()
    generated = template.replace("../../", f"{COPIED}/") + SECRET_GENERATOR
    if overlay.exists() and overlay.read_text() != generated:
        output.print_status(f"kept {overlay}, which was edited")
    else:
        overlay.write_text(generated)
    template = (TEMPLATE / "settings.env").read_text()
    present = settings.read_text() if settings.exists() else ""
    settings.write_text(_settings(template, project, values, present))
    _write_secrets(folder / "secrets", str(store))
    token = folder / "secrets" / "admin-token"
    output.print_result(
        {"folder": str(folder), "admin_token_file": str(token)},
        f"wrote {folder}; secrets/ is not for version control\n"
        "  review: settings.env\n"
        "  queues: those of `tpu cluster install`; without a cluster.yaml:\n"
        f"          kubectl apply --server-side -k {folder / COPIED}/queues\n"
        f"  deploy: kubectl apply --server-side -k {folder}\n"
        "  use:    kubectl -n tpufleet-system port-forward service/tpufleet 8470 &\n"
        f"          TPUFLEET_SERVER=http://127.0.0.1:8470 TPUFLEET_TOKEN_FILE={token} tpu status\n"
        "  docs:   docs/kubernetes.md#deploying (APIs, service accounts, bucket, database)",
    )


def _settings(template: str, project: str, values: dict[str, str], present: str) -> str:
    """The template with these values. What someone changed or added in `present` stays."""
    defaults = {
        name: value
        for line in template.splitlines()
        if not line.startswith("#")
        for name, _, value in [line.partition("=")]
    }
    lines = present.splitlines()
    before = dict(line.partition("=")[::2] for line in lines if not line.startswith("#"))
    last_project = before.get(PROJECT_NAME, project)
    result = []
    for name, default in defaults.items():
        if before.get(name) not in (None, default.replace(PLACEHOLDER, last_project)):
            default = before[name]
        result.append(f"{name}={values.get(name) or default.replace(PLACEHOLDER, project)}")
    result += [line for line in lines if line.partition("=")[0] not in defaults]
    return "\n".join(result) + "\n"


def _write_secrets(folder: Path, store: str) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    generated = {"secret": secrets.token_hex(32), "admin-token": token}
    for name, value in {**generated, "store-url": store}.items():
        path = folder / name
        if name in generated and path.exists():
            continue
        # Without a line end: the database URL becomes an environment variable as it is.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(value)

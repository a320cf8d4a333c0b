"""`tpu provisioner`: GKE node pools for JobSets, and the admission webhook."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from tpufleet.views.cli.registry import HintedUsageError


@click.command(
    epilog="\b\nExamples:\n  tpu provisioner --leader-elect\n  tpu provisioner --dry-run\n"
    "  tpu provisioner --admit :5000 --certificates /etc/tls\n"
    "  tpu provisioner --make-policies us-central1\n",
)
@click.option(
    "--metrics-bind-address",
    "metrics_address",
    default="127.0.0.1:8080",
    metavar="HOST:PORT",
    show_default=True,
    help="Address of /metrics; :8080 for all interfaces.",
)
@click.option(
    "--health-probe-bind-address",
    "probe_address",
    default="127.0.0.1:8081",
    metavar="HOST:PORT",
    show_default=True,
    help="Address of /healthz and /readyz.",
)
@click.option("--leader-elect", is_flag=True, help="Elect one leader among several replicas.")
@click.option("--dry-run", is_flag=True, help="Log the planned actions without performing them.")
@click.option("--kubeconfig", type=click.Path(path_type=Path), help="Default: as kubectl.")
@click.option(
    "--namespace",
    default="tpu-provisioner-system",
    show_default=True,
    help="Namespace of the lease.",
)
@click.option(
    "--gke-endpoint",
    default="",
    envvar="GKE_ENDPOINT",
    metavar="HOST:PORT",
    help="An emulated GKE, as of `tpu cluster local up --gke` (default: Google's; also as "
    "GKE_ENDPOINT).",
)
@click.option(
    "--make-policies",
    metavar="REGION",
    help="Create the workload policies that tpu7x slices need in REGION, and exit.",
)
@click.option(
    "--admit", metavar="HOST:PORT", help="Run the admission webhook on this address instead."
)
@click.option(
    "--certificates",
    type=click.Path(path_type=Path),
    help="With --admit: folder with tls.crt and tls.key.",
)
@click.pass_context
def provisioner(
    context: click.Context,
    make_policies: str | None,
    admit: str | None,
    certificates: Path | None,
    **options: Any,
) -> None:
    """Create GKE node pools for JobSets whose pods wait for TPUs, and delete them afterwards.

    Its settings are environment variables; docs/provisioner.md lists them.
    """
    if admit is not None and certificates is None:
        raise HintedUsageError("--admit requires --certificates DIR (tls.crt and tls.key)")
    if make_policies is not None:
        from tpufleet_gke.provisioner.gke import workload_policies

        status = workload_policies.run(os.environ, make_policies, dry_run=options["dry_run"])
    elif admit is not None and certificates is not None:
        from tpufleet_gke.provisioner.kube import webhook_server

        status = webhook_server.run(os.environ, admit, certificates, options["probe_address"])
    else:
        from tpufleet_gke.provisioner.main import ProvisionerOptions, run

        status = run(os.environ, ProvisionerOptions(**options))
    context.exit(status)

"""`tpu bridge firestore`: run the code in a Firestore collection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tpufleet.views.cli import connection
from tpufleet.views.cli.output import example, repeatable
from tpufleet_firestore.cli.collection_options import collection_options

# The program on the hosts that runs submitted code.
CODE_RUNNER = Path(__file__).parents[1] / "submitted_code"


@click.group(epilog=example("tpu bridge firestore --accelerator v5e-1 --pool web"))
def bridge() -> None:
    """Run jobs from another system's queue, and report their status there."""


@bridge.command(
    "firestore",
    epilog="""\b
Examples:
  tpu bridge firestore --project my-project --accelerator v5e-1 --pool web
  FIRESTORE_EMULATOR_HOST=127.0.0.1:8080 tpu bridge firestore --project demo --accelerator v5e-1
""",
)
@click.option(
    "--accelerator", metavar="TYPE", required=True, help="TPU type that the code runs on."
)
@click.option("--pool", help="Pool of the slices.")
@repeatable("--capacity", metavar="KIND", help="spot, on-demand, reserved or queued.")
@click.option("--priority", type=int, help="Larger is scheduled first.")
@collection_options
@click.option(
    "--results",
    "results_location",
    metavar="LOCATION",
    help="Location of results too large for a document: gs://bucket/folder (default: the server).",
)
@click.option(
    "--keep",
    "retention",
    metavar="SPAN",
    help="Delete results and code of documents that ended this long ago, such as 30d; "
    "the documents are kept (default: never).",
)
@click.option(
    "--link-lifetime",
    "lifetime",
    metavar="SPAN",
    help="How long `log_url` and `result_url` of a document work (default: 7d).",
)
@click.option(
    "--public-url",
    "server_url",
    metavar="URL",
    help="Address of the server in these links (default: that of --server).",
)
@click.option(
    "--adopt-after",
    metavar="SPAN",
    help="Run documents that are `scheduled` or `running` without a bridge, as the former worker "
    "leaves them, when they have not changed for their timeout and this time (default: 10m).",
)
@click.option("--python", help="Python with JAX on the hosts (default: python3).")
@click.option(
    "--user",
    help="User that runs the code if the agent is root (default: `nobody`).",
)
@click.option(
    "--allow-root",
    is_flag=True,
    help="Run the code as root where that user cannot run Python; without it, documents fail.",
)
@click.option("--retries", type=int, help="Retries after infrastructure failures (default: 3).")
@click.option(
    "--most",
    "max_documents",
    type=int,
    help="Maximum number of documents at a time (default: 100).",
)
@click.option(
    "--probes",
    "probe_address",
    metavar="ADDRESS",
    help="Address of /healthz, /readyz and /metrics, such as 127.0.0.1:8081 (default: none).",
)
@click.option(
    "--heartbeat",
    "heartbeat_seconds",
    type=float,
    metavar="SECONDS",
    help="Seconds between heartbeats (default: 5).",
)
@click.pass_context
def firestore(context: click.Context, **options: Any) -> None:
    """Run each document with `status: pending`, and write its status back.

    Several bridges share the work; when one dies, the others take over its documents. Stops on
    Ctrl-C or SIGTERM; running jobs continue, and the next bridge writes their outcome.
    """
    from tpufleet_firestore.bridge.program import run, settings_from_options

    with connection.connect() as client:
        context.exit(run(settings_from_options(options, CODE_RUNNER), client))

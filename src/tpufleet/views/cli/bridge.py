"""`tpu bridge firestore`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from tpufleet.views.cli import connection
from tpufleet.views.cli.output import repeatable

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient


def bridge_command(run: Callable[[FleetClient, dict[str, Any]], int]) -> click.Command:
    @click.group("bridge", short_help="Run what another queue asks for.")
    def bridge() -> None:
        """Run what another queue asks for, and tell it what became of it."""

    @bridge.command(
        "firestore",
        short_help="The documents of a Firestore collection.",
        epilog="""\b
Examples:
  tpu bridge firestore --project my-project --accelerator v5e-1 --pool web
  FIRESTORE_EMULATOR_HOST=127.0.0.1:8080 tpu bridge firestore --project demo --accelerator v5e-1
""",
    )
    @click.option("--accelerator", metavar="TYPE", required=True, help="What the code runs on.")
    @click.option("--pool", help="Pool that the slices come from.")
    @repeatable("--capacity", metavar="KIND", help="spot, on-demand, reserved or queued.")
    @click.option("--priority", type=int, help="Larger goes first.")
    @click.option("--project", help="Google Cloud project (default: that of the credentials).")
    @click.option("--database", help="Firestore database (default: the default one).")
    @click.option("--collection", help="Collection of documents (default: tpu_jobs).")
    @click.option(
        "--results",
        metavar="PLACE",
        help="Where results go that a document cannot hold: gs://bucket/folder or a full path "
        "(default: they stay in the control plane).",
    )
    @click.option(
        "--keep",
        metavar="SPAN",
        help="Drop the results and the code of documents that ended longer ago than, say, 30d; the "
        "documents stay (default: nothing is dropped).",
    )
    @click.option("--python", help="Python with JAX on the hosts (default: python3).")
    @click.option(
        "--user",
        help="Who runs the code on hosts where the agent is root (default: nobody, where that "
        "user can run Python).",
    )
    @click.option("--retries", type=int, help="Tries after faults of the machine (default: 3).")
    @click.option("--most", type=int, help="Documents in hand at a time (default: 100).")
    @click.option(
        "--probes",
        metavar="ADDRESS",
        help="Answer /healthz and /readyz there, such as 127.0.0.1:8081 (default: nowhere).",
    )
    @click.option("--beat", type=float, metavar="SECONDS", help="Between signs of life.")
    @click.pass_context
    def firestore(context: click.Context, **options: Any) -> None:
        """Run each document with `status: pending`, and write back what becomes of it.

        Several bridges share the work; when one dies, the others take over what it held. Ends on
        Ctrl-C or SIGTERM; jobs that run go on, and the next bridge writes down how they ended.
        """
        with connection.connect() as client:
            context.exit(run(client, options))

    return bridge

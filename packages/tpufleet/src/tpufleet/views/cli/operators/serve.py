"""`tpu serve`: the server."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import click
import psutil
from msgspec import structs

from tpufleet import config
from tpufleet.errors import FleetError
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option

STOP_TIMEOUT_SECONDS = 30.0
STOPPED_BY_COMMAND = "stopped by `tpu serve --stop --all`"


@click.command(
    epilog="\b\nExamples:\n  tpu serve\n  tpu serve --listen 0.0.0.0:8470 "
    "--tls-cert cert.pem --tls-key key.pem\n  tpu serve --stop\n",
)
@click.option("--listen", metavar="HOST:PORT", help="Address (default: 127.0.0.1, a free port).")
@click.option("--store", metavar="URL", help="Database (default: SQLite in the state folder).")
@click.option("--provider", metavar="NAME", help="Provider for jobs that name none.")
@click.option(
    "--enable",
    multiple=True,
    metavar="PROVIDER",
    help="Provider that jobs may use; repeatable (default: those that are configured; without one, "
    "local, unless other machines can reach the server).",
)
@click.option("--tls-cert", metavar="FILE", help="Serve HTTPS with this certificate chain (PEM).")
@click.option("--tls-key", metavar="FILE", help="Private key of the certificate (PEM, mode 600).")
@click.option(
    "--insecure-http", is_flag=True, help="Allow plain HTTP on an address beyond loopback."
)
@click.option("--embedded", is_flag=True, hidden=True)
@click.option("--stop", is_flag=True, help="Stop the server of this state folder.")
@click.option("--all", "everything", is_flag=True, help="With --stop: its simulated slices too.")
@json_option
@click.pass_context
def serve(
    context: click.Context,
    listen: str | None,
    store: str | None,
    provider: str | None,
    enable: tuple[str, ...],
    tls_cert: str | None,
    tls_key: str | None,
    insecure_http: bool,
    embedded: bool,
    stop: bool,
    everything: bool,
) -> None:
    """Run the server: the HTTP API and the controller.

    State is kept in one folder (TPUFLEET_HOME). Several servers may share one Postgres; one of them
    is the leader. Simulated slices and their jobs outlive the server, and the next one takes them
    over; `tpu serve --stop --all` stops them too, and the next server runs the jobs again.
    """
    from tpufleet.compose.backup import original_stopped
    from tpufleet.compose.server_files import exclusive_lock

    if stop:
        # A typo in the config file must not keep a server running: the folders are enough.
        settings, errors = config.load_valid(os.environ, Path.home())
        output.print_warnings(errors)
        data = config.embedded_data_folder(settings.home) or settings.data
        if everything:
            from tpufleet.compose import local_root

            local_root.refuse_other_servers(data, settings.home)
        stopped = stop_server(settings.home)
        outcome = "stopped the server" if stopped else f"no server is running in {settings.home}"
        result: dict[str, object] = {"stopped": stopped}
        if everything:
            from tpufleet.compose.providers import stop_local_slices

            settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Also against a copy of this folder, which controls the same slices.
            with original_stopped(settings.home), exclusive_lock(settings.home):
                slices = stop_local_slices(data, STOPPED_BY_COMMAND)
            result["slices"] = slices
            outcome += f"; stopped {text.counted(slices, 'simulated slice')}"
            if slices:
                outcome += (
                    "\n  next: `tpu serve` runs their jobs again, each from its last checkpoint; "
                    "end one for good with `tpu cancel JOB`"
                )
        output.print_result(result, outcome)
        return
    if listen is not None:
        config.checked(config.parse_listen_address, listen, "--listen")
    for name in enable:
        config.checked(config.parse_provider, name, "--enable")
    settings = connection.settings(serve=True, enable=enable, tls_options=bool(tls_cert or tls_key))
    # uvicorn shuts down on SIGTERM, then raises it again: by default that would kill the process
    # before the server has cleaned up. As an exception it passes through every `finally`.
    signal.signal(signal.SIGTERM, _exit)
    from tpufleet.compose.control_plane import serve as run_server

    overridden = structs.replace(
        settings,
        listen=listen if listen is not None else settings.listen,
        store=store if store is not None else settings.store,
        provider=provider if provider is not None else settings.provider,
        providers=enable or settings.providers,
        tls_cert=Path(tls_cert).absolute() if tls_cert else settings.tls_cert,
        tls_key=Path(tls_key).absolute() if tls_key else settings.tls_key,
        insecure_http=insecure_http or settings.insecure_http,
    )
    overridden.check_transport()
    overridden.check_certificate()
    os.umask(0o022)  # jobs of members run as another user, and read their code and agent
    with original_stopped(settings.home):
        context.exit(run_server(overridden, embedded=embedded))


def _exit(*_: object) -> None:
    raise SystemExit(0)


def stop_server(home: Path) -> bool:
    """SIGTERM to the server of this state folder, and wait until it has exited. False: none ran."""
    try:
        pid = int(json.loads((home / "server.json").read_text())["pid"])
        process = psutil.Process(pid)
        is_server = "serve" in process.cmdline()  # the pid may have been reused
    except (OSError, ValueError, KeyError, TypeError, psutil.NoSuchProcess):
        return False
    if not is_server:
        return False
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
    while psutil.pid_exists(pid) and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            raise FleetError(
                f"the server (process {pid}) did not stop within {STOP_TIMEOUT_SECONDS:.0f} s\n"
                f"  log: {home}/server.log\n"
                f"  next: kill -9 {pid}"
            )
        time.sleep(0.05)
    return True

"""The `tpu` command. Joins what only the top layer knows to the command line below it.

Nothing is imported before it is needed: `tpu --help` answers at once, and an agent, of which a
fleet has thousands, starts without the weight of the command line.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import click

    from tpufleet.client.fleet import FleetClient
    from tpufleet.config import Config
    from tpufleet.views.cli.cluster import Local
    from tpufleet.views.cli.emulator import EmulatorOptions
    from tpufleet.views.cli.extract import Fleets
    from tpufleet.views.cli.registry import LazyGroup
    from tpufleet.views.cli.vm.fleet import Nodes


def _serve(settings: Config, embedded: bool) -> int:
    from tpufleet.compose import control_plane

    return control_plane.serve(settings, embedded=embedded)


def _agent() -> int:
    from tpufleet.agent import main as agent

    return agent.run(os.environ)


def _emulator(options: EmulatorOptions) -> int:
    from tpufleet.compose import providers

    return providers.run_emulator(options)


def _nodes(project: str | None) -> Nodes:
    from tpufleet.compose import providers
    from tpufleet.views.cli import connection, output

    return providers.manual_nodes(connection.settings(), project, output.print_status)


def _rules() -> list[dict[str, str]]:
    from tpufleet.model.jobs import Capacity, Rule
    from tpufleet.policy import retry_rules

    rows = []
    for rule in Rule:
        follows = {
            reason.value: str(retry_rules.rule_action(rule, reason))
            for reason in retry_rules.GOVERNED_REASONS
        }
        kinds = [kind.value for kind in Capacity if retry_rules.default_rule(kind) is rule]
        rows.append({"rule": rule.value, **follows, "default_for": ", ".join(kinds) or "-"})
    return rows


def _clear(home: Path) -> None:
    from tpufleet.compose import providers

    providers.delete_local_slices(home)


def _clusters() -> Local:
    from tpufleet.testbed.kubernetes import commands

    return commands


def _provisioner(
    *,
    metrics_bind_address: str,
    health_probe_bind_address: str,
    leader_elect: bool,
    dry_run: bool,
    kubeconfig: Path | None,
    namespace: str,
    gke_endpoint: str,
    admit: str | None,
    certificates: Path | None,
    make_policies: str | None,
    compute_endpoint: str,
) -> int:
    from tpufleet.provisioner import main as provisioner
    from tpufleet.provisioner.gke_api import workload_policies
    from tpufleet.provisioner.kube import webhook_server

    if make_policies is not None:
        return workload_policies.run(
            os.environ, make_policies, dry_run=dry_run, endpoint=compute_endpoint
        )

    if admit is not None and certificates is not None:
        return webhook_server.run(os.environ, admit, certificates, health_probe_bind_address)

    options = provisioner.ProvisionerOptions(
        metrics_address=metrics_bind_address,
        probe_address=health_probe_bind_address,
        leader_elect=leader_elect,
        dry_run=dry_run,
        kubeconfig=kubeconfig,
        gke_endpoint=gke_endpoint,
        namespace=namespace,
    )
    return provisioner.run(os.environ, options)


def _bridge(client: FleetClient, options: dict[str, Any]) -> int:
    from tpufleet.bridges.firestore import program as running

    program = Path(__file__).parent / "workloads" / "submitted_code"
    return running.run(running.settings_from_options(options, program), client)


def _codes(options: dict[str, Any]) -> Any:
    from tpufleet.bridges.firestore.submissions import CodeSubmissions

    return CodeSubmissions(**options)


def _extract() -> click.Group:
    from tpufleet.workloads.activations.cli.extract import extract

    return extract


def _extract_fleets() -> Fleets:
    from tpufleet.workloads.activations import fleet

    return fleet


def command() -> LazyGroup:
    """The `tpu` command with all of its verbs."""
    from tpufleet.views.cli import program

    top = program.Top(
        serve=_serve,
        agent=_agent,
        rules=_rules,
        clusters=_clusters,
        provisioner=_provisioner,
        emulator=_emulator,
        nodes=_nodes,
        clear=_clear,
        bridge=_bridge,
        codes=_codes,
        extract=_extract,
        extract_fleets=_extract_fleets,
    )
    return program.build(top)


def run(args: Sequence[str]) -> int:
    """The exit status."""
    if list(args) == ["agent"]:
        return _agent()
    from tpufleet.views.cli import program

    return program.run(command(), args)


def main() -> None:
    if sys.stderr is not None:  # a caller may have closed it
        faulthandler.enable()  # a crash inside a library says where it was
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()

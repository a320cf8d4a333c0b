"""The whole `tpu` program: every verb, and how an error reads when it reaches a person."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tpufleet.errors import BadInput, FleetError
from tpufleet.views.cli import registry
from tpufleet.views.cli.registry import FLEET, RUN, LazyCommand, LazyGroup

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient
    from tpufleet.config import Config
    from tpufleet.views.cli.cluster import Local
    from tpufleet.views.cli.emulator import EmulatorOptions
    from tpufleet.views.cli.extract import Fleets
    from tpufleet.views.cli.vm.fleet import Nodes

SERVER = "The control plane"
BY_HAND = "TPU VMs by hand"
NODE_VERBS = {
    "apply": "Create one node, trying again.",
    "reapply": "Delete one node and create it again.",
    "delete": "Delete one node.",
    "restart": "Stop one node and start it again.",
    "describe": "Everything about one node.",
    "check-status": "The state of one node in a word.",
    "check-env": "Which chips JAX sees on one node.",
    "solve": "Make one node usable again.",
    "mount-disk": "Attach and mount data disks of one node.",
    "set-wandb": "Give one node a key of Weights & Biases.",
    "lian": "A shell on a host of one node.",
    "test": "Run typed lines on every host of one node.",
}
INTERRUPTED = 130
OTHER_NAMES = {
    "check-rules": "rules", "applyy": "apply", "apply-norm": "apply", "reapplyy": "reapply",
    "reapply-norm": "reapply", "solve-env": "solve", "mount-disk-new": "mount-disk",
    "clear": "clean", "clear-all": "clean",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Top:
    """What only the top layer can do."""

    serve: Callable[[Config, bool], int]
    agent: Callable[[], int]
    rules: Callable[[], list[dict[str, str]]]  # each rule, and what it does by reason
    emulator: Callable[[EmulatorOptions], int]
    nodes: Callable[[str | None], Nodes]  # TPU VMs by hand, of a project
    clear: Callable[[Path], None]  # takes away simulated slices that a state folder still has
    clusters: Callable[[], Local]  # Kubernetes control planes on this machine
    provisioner: Callable[..., int]
    bridge: Callable[[FleetClient, dict[str, Any]], int]  # runs until it is told to end
    codes: Callable[[dict[str, Any]], Any]  # the client's side of a Firestore collection
    extract: Callable[[], click.Group]  # the verbs of the workload that extracts activations
    extract_fleets: Callable[[], Fleets]  # and what it knows of fleets


def build(top: Top) -> LazyGroup:
    extra = {
        "fleet": LazyCommand(BY_HAND, "Create, watch and delete a fleet.", lambda: _fleet(top)),
        **{
            name: LazyCommand(BY_HAND, words, lambda name=name: _node_verb(top, name))
            for name, words in NODE_VERBS.items()
        },
        "demo": LazyCommand(RUN, "Watch a job lose its TPU and finish.", lambda: _demo(top)),
        "extract": LazyCommand(
            RUN, "Extract activations, each sample once.", lambda: _extract(top)
        ),
        "submit-code": LazyCommand(RUN, "Send code by Firestore.", lambda: _submit_code(top)),
        "rules": LazyCommand(FLEET, "The five rules of recovery.", lambda: _rules(top)),
        "serve": LazyCommand(SERVER, "Run the control plane.", lambda: _serve(top)),
        "agent": LazyCommand(SERVER, "Run the agent of one host.", lambda: _agent(top)),
        "cluster": LazyCommand(
            SERVER, "Kubernetes clusters, also a local one.", lambda: _cluster(top)
        ),
        "provisioner": LazyCommand(
            SERVER, "Make node pools for JobSets.", lambda: _provisioner(top)
        ),
        "emulator": LazyCommand(
            SERVER, "Run a Cloud TPU API on this machine.", lambda: _emulator(top)
        ),
        "bridge": LazyCommand(SERVER, "Run what another queue asks for.", lambda: _bridge(top)),
        "version": LazyCommand(SERVER, "Say which version this is.", _version),
    }
    return registry.root(extra, aliases=OTHER_NAMES)


def run(cli: LazyGroup, args: Sequence[str]) -> int:
    """The exit status: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    try:
        answer = cli.main(list(args) or ["--help"], prog_name="tpu", standalone_mode=False)
        return answer if isinstance(answer, int) else 0
    except click.UsageError as error:
        return _usage(error)
    except click.ClickException as error:
        return _complain(error.format_message(), error, 1)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BadInput as error:
        return _complain(str(error), error, 2)
    except FleetError as error:
        return _complain(str(error) or type(error).__name__, error, 1)
    except Exception as error:  # the last resort of the program: a person must not see a traceback
        words = f"unexpected {type(error).__name__}: {error}; TPUFLEET_DEBUG=1 shows where"
        return _complain(words, error, 1)


def _usage(error: click.UsageError) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # a group without a subcommand
        error.show()
        return 2
    words = error.format_message().rstrip(".")
    path = error.ctx.command_path if error.ctx is not None else "tpu"
    if isinstance(error, click.NoSuchOption) and path == "tpu run":
        words += "; options of your own command go after `--`"
    hint = "" if "`tpu" in words else f"; see `{path} --help`"
    return _complain(words[:1].lower() + words[1:] + hint, error, 2)


def _complain(words: str, error: BaseException, status: int) -> int:
    from tpufleet import config  # not needed when all goes well

    if config.debug_enabled(os.environ):
        traceback.print_exception(error)
    for line in words.splitlines():
        click.echo(f"tpu: {line}", err=True)
    return status


def _serve(top: Top) -> click.Command:
    from tpufleet.views.cli import serve as serving

    return serving.serve_command(top.serve, top.clear)


def _bridge(top: Top) -> click.Command:
    from tpufleet.views.cli import bridge as bridging

    return bridging.bridge_command(top.bridge)


def _submit_code(top: Top) -> click.Command:
    from tpufleet.views.cli import submit_code as codes

    return codes.submit_code_command(top.codes)


def _extract(top: Top) -> click.Command:
    from tpufleet.views.cli import extract as extractions

    return extractions.with_fleets(top.extract(), top.extract_fleets)


def _demo(top: Top) -> click.Command:
    from tpufleet.views.cli import demo

    return demo.demo_command(top.clear)


def _emulator(top: Top) -> click.Command:
    from tpufleet.views.cli import emulator as emulating

    return emulating.emulator_command(top.emulator)


def _fleet(top: Top) -> click.Command:
    from tpufleet.views.cli.vm import fleet

    return fleet.fleet_group(top.nodes)


def _node_verb(top: Top, name: str) -> click.Command:
    from tpufleet.views.cli.vm import nodes, shell

    return {**nodes.node_commands(top.nodes), **shell.shell_commands(top.nodes)}[name]


def _rules(top: Top) -> click.Command:
    from tpufleet.views.cli import serve as serving

    return serving.rules_command(top.rules())


def _cluster(top: Top) -> click.Command:
    from tpufleet.views.cli import cluster as clusters

    return clusters.cluster_command(top.clusters())


def _provisioner(top: Top) -> click.Command:
    from tpufleet.views.cli import cluster as clusters

    return clusters.provisioner_command(top.provisioner)


def _agent(top: Top) -> click.Command:
    @click.command("agent")
    @click.pass_context
    def agent(context: click.Context) -> None:
        """Run the agent of one host. Providers start it; its settings are in the environment."""
        context.exit(top.agent())

    return agent


def _version() -> click.Command:
    @click.command("version")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
    def version(as_json: bool) -> None:
        """Say which version of tpufleet this is."""
        from importlib import metadata

        found = metadata.version("tpufleet")
        click.echo(f'{{"version":"{found}"}}' if as_json else f"tpufleet {found}")

    return version

"""The verbs for one TPU VM by name: `tpu apply`, `reapply`, `delete`, `restart`, `describe`,
`check-status`, `check-env` and `solve`. With your own Google credentials, and no control plane."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from tpufleet.errors import BadInput, FleetError
from tpufleet.model import fleets
from tpufleet.model.fleets import NodeFacts, NodeWish
from tpufleet.views.cli import gcloud, output
from tpufleet.views.cli.fleets import (
    KIND,
    PROJECT,
    TRIES,
    YES,
    Open,
    Outcome,
    example,
    interruptible,
    options,
    show,
    tell,
)
from tpufleet.views.cli.output import json_option

PROBE_SECONDS = 300.0
# Only what belongs to nobody: a lock that a process holds is left alone.
_FREE_CHIPS = "sudo fuser -s /tmp/libtpu_lockfile || sudo rm -f /tmp/libtpu_lockfile"
_SHOW_DEVICES = "import jax; print('devices', jax.local_device_count(), jax.device_count())"
_TRY_WORD = re.compile(r"(?P<what>[tm])=(?P<number>\d+)")


def node_commands(open_nodes: Open) -> dict[str, Callable[[], click.Command]]:
    """The verbs for one node by name."""
    named = options(
        click.argument("name"),
        click.option("--zone", help="Needed when the name does not tell it."),
        PROJECT,
    )
    # `t=10 m=2000` are other spellings of --retry-delay and --max-retries.
    words = click.argument("words", nargs=-1, metavar="[t=SECONDS] [m=TRIES]")

    @_verb("apply", "tpu apply tpu-us-central1-a-0 --type v5e-8")
    @options(named, words, KIND, TRIES, json_option)
    @click.pass_context
    def apply(context: click.Context, name: str, zone: str | None, project: str | None,
              as_json: bool, **given: Any) -> None:  # fmt: skip
        """Create one node and wait until it is ready, trying again while that may help."""
        nodes, where = open_nodes(project), _zone_of(name, zone)
        tries, delay = _tries(given)
        with interruptible(f"tpu delete {name} --zone {where}"):
            made = nodes.create(where, name, _wish(context, given), tries, delay)
        show([made], as_json)

    @_verb("reapply", "tpu reapply tpu-us-central1-a-0 --yes")
    @options(named, words, KIND, TRIES, YES, json_option)
    @click.pass_context
    def reapply(context: click.Context, name: str, zone: str | None, project: str | None,
                yes: bool, as_json: bool, **given: Any) -> None:  # fmt: skip
        """Delete one node and create it again: as it was, unless you say otherwise."""
        nodes, where = open_nodes(project), _zone_of(name, zone)
        wish = _wish(context, given, nodes.get(where, name))
        output.confirm(f"Delete {name} and make it again?", yes)
        tries, delay = _tries(given)
        with interruptible(f"tpu delete {name} --zone {where}"):
            nodes.delete(where, name)
            made = nodes.create(where, name, wish, tries, delay)
        show([made], as_json)

    @_verb("delete", "tpu delete tpu-us-central1-a-0 --yes")
    @options(named, YES, json_option)
    def delete(
        name: str, zone: str | None, project: str | None, yes: bool, as_json: bool
    ) -> None:
        """Delete one node, and wait until it is gone."""
        nodes, where = open_nodes(project), _zone_of(name, zone)
        output.confirm(f"Delete {name} in {where}?", yes)
        nodes.delete(where, name)
        tell([Outcome(name=name, zone=where, result="deleted")], as_json)

    @_verb("restart", "tpu restart tpu-us-central1-a-0")
    @options(named, json_option)
    def restart(name: str, zone: str | None, project: str | None, as_json: bool) -> None:
        """Stop one node and start it again; its disk stays."""
        show([open_nodes(project).restart(_zone_of(name, zone), name)], as_json)

    @_verb("describe", "tpu describe tpu-us-central1-a-0")
    @options(named, json_option)
    def describe(name: str, zone: str | None, project: str | None, as_json: bool) -> None:
        """Everything that the cloud says of one node."""
        found = open_nodes(project).get(_zone_of(name, zone), name)
        if as_json:
            output.emit_json(found)
            return
        labels = ", ".join(f"{key}={value}" for key, value in (found.labels or {}).items())
        output.facts([
            ("name", found.name), ("zone", found.zone), ("state", found.state),
            ("health", found.health), ("type", found.accelerator), ("runtime", found.runtime),
            ("capacity", found.capacity), ("addresses", ", ".join(found.addresses)),
            ("labels", labels), ("the cloud says", found.words),
        ])  # fmt: skip

    @_verb("check-status", "tpu check-status tpu-us-central1-a-0")
    @options(named, json_option)
    def check_status(name: str, zone: str | None, project: str | None, as_json: bool) -> None:
        """The state of one node, in one word: ready, preempted, creating, … or not found."""
        found = open_nodes(project).get(_zone_of(name, zone), name)
        if as_json:
            output.emit_json({"name": name, "state": found.state})
        else:
            click.echo(_in_words(found))

    @_verb("check-env", "tpu check-env tpu-us-central1-a-0")
    @options(named, json_option)
    def check_env(name: str, zone: str | None, project: str | None, as_json: bool) -> int:
        """Ask JAX on every host of a node which chips it sees, by ssh through gcloud.

        The exit status is 1 when it sees none.
        """
        finding = _probe(name, _zone_of(name, zone), project)
        tell([finding], as_json)
        return int(finding.result != "good")

    @_verb("solve", "tpu solve tpu-us-central1-a-0 --yes")
    @options(named, words, KIND, TRIES, YES, json_option)
    @click.pass_context
    def solve(context: click.Context, name: str, zone: str | None, project: str | None,
              yes: bool, as_json: bool, **given: Any) -> int:  # fmt: skip
        """Make one node usable: made again if it was taken, freed of stale locks, looked at again.

        No process is ended. The exit status is 1 when it still is not usable.
        """
        nodes, where = open_nodes(project), _zone_of(name, zone)
        found = nodes.get(where, name)
        if found.state in fleets.GONE_STATES:
            wish = _wish(context, given, found)
            output.confirm(f"{name} is {_in_words(found)}. Make it again?", yes)
            with interruptible(f"tpu delete {name} --zone {where}"):
                nodes.delete(where, name)
                nodes.create(where, name, wish, *_tries(given))
        elif found.state != "READY":
            raise FleetError(f"{name} is {_in_words(found)}; try again when it is ready")
        finding = _probe(name, where, project)
        if finding.result == "chips in use":
            output.say(f"{name}: {finding.words}; taking away stale locks")
            gcloud.answer(_ssh(name, where, project, "sh", "-c", _FREE_CHIPS), PROBE_SECONDS)
            finding = _probe(name, where, project)
        tell([finding], as_json)
        return int(finding.result != "good")

    made = (apply, reapply, delete, restart, describe, check_status, check_env, solve)
    return {str(command.name): (lambda found=command: found) for command in made}


def _verb(name: str, line: str) -> Callable[[Any], click.Command]:
    return click.command(name, epilog=example(line))


def _in_words(found: NodeFacts) -> str:
    return found.state.lower().replace("_", " ")


def _zone_of(name: str, zone: str | None) -> str:
    known = fleets.parse(name)
    if zone is not None:
        return zone
    if known is None:
        raise BadInput(f"--zone: {name!r} does not tell where it is; say so")
    return known.zone


def _wish(
    context: click.Context, given: dict[str, Any], before: NodeFacts | None = None
) -> NodeWish:
    """What was asked for in words; for the rest what the node was, where that is known."""
    wish = NodeWish(
        accelerator=given["accelerator"], spot=given["spot"], runtime=given["runtime"]
    )
    if str(context.info_name).endswith("-norm"):
        return NodeWish(accelerator=wish.accelerator, spot=False, runtime=wish.runtime)
    if before is None or not before.accelerator:
        return wish
    said = {
        name for name in given
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    }  # fmt: skip
    return NodeWish(
        accelerator=wish.accelerator if "accelerator" in said else before.accelerator,
        spot=wish.spot if "spot" in said else before.capacity == "spot",
        runtime=wish.runtime if said & {"runtime", "accelerator"} else before.runtime,
    )


def _tries(given: dict[str, Any]) -> tuple[int, float]:
    tries, delay = given["tries"], given["delay"]
    for word in given["words"]:
        found = _TRY_WORD.fullmatch(word)
        if found is None:
            raise BadInput(f"{word!r} is not understood; t=SECONDS and m=TRIES are")
        if found["what"] == "t":
            delay = float(found["number"])
        else:
            tries = int(found["number"])
    return tries, delay


def _ssh(name: str, zone: str, project: str | None, *command: str) -> list[str]:
    return gcloud.ssh(name, zone, project, "all", command)


def _probe(name: str, zone: str, project: str | None) -> Outcome:
    argv = _ssh(name, zone, project, "python3", "-c", _SHOW_DEVICES)
    status, said = gcloud.answer(argv, PROBE_SECONDS)
    seen = re.findall(r"^devices (\d+) (\d+)$", said, re.MULTILINE)
    if status == 0 and seen:
        words = f"{len(seen)} hosts see {seen[0][1]} chips"
        return Outcome(name=name, zone=zone, result="good", words=words)
    for sign, result, words in _SIGNS:
        if sign in said:
            return Outcome(name=name, zone=zone, result=result, words=words)
    last = (said.strip().splitlines() or ["nothing was said"])[-1]
    return Outcome(name=name, zone=zone, result="bad", words=f"exit status {status}: {last[:200]}")


_SIGNS = (
    ("already in use", "chips in use", "another process holds the chips"),
    ("No module named 'jax'", "no JAX", "pip install 'jax[tpu]' on its hosts"),
    ("Permission denied", "no ssh", "your key is not accepted: see `gcloud auth login`, OS Login"),
    ("no answer within", "no answer", "a host hangs; `tpu restart` or `tpu reapply` it"),
)

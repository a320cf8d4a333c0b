"""`tpu cluster init|plan|apply|destroy`: the GKE environment of a cluster.yaml."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tpufleet import schema
from tpufleet.errors import BadInput, InvalidSettings, exists, install_command, unreadable
from tpufleet.views.cli import output
from tpufleet.views.cli.output import json_option, yes_option
from tpufleet.views.cli.registry import shared_option
from tpufleet_gke.environment.addons import install
from tpufleet_gke.environment.config import capacity, checks, parse, starter_file
from tpufleet_gke.environment.config.sections import Environment
from tpufleet_gke.environment.terraform import costs, live_slices, plan_summary, stages
from tpufleet_gke.environment.terraform.plan_summary import Change
from tpufleet_gke.environment.terraform.stages import StageName
from tpufleet_gke.locations import Zone

if TYPE_CHECKING:
    from tpufleet_gke.environment.terraform.runner import StagePlan, StageRunner

REHEARSAL = ".rehearsal"
rehearse_option = click.option(
    "--rehearse",
    is_flag=True,
    help="Use an emulated Google Cloud, kept in the folder .rehearsal; needs no account.",
)


@click.command(
    epilog="\b\nExample:\n  tpu cluster init --project my-project --zone us-central1-a\n"
)
@click.option("--project", required=True, help="Google Cloud project id.")
@click.option("--zone", "zones", multiple=True, required=True, help="Zone of TPUs. Repeatable.")
@output.type_option
@json_option
def init(project: str, zones: tuple[str, ...], tpu_type: str) -> None:
    """Write a commented cluster.yaml, and its JSON schema for editors."""
    file: Path = shared_option("file")
    if file.exists():
        raise exists(file, "edit it, or pass --file with another name")
    for zone in zones:
        schema.parse(Zone, zone, path="--zone")
    text = starter_file.starter_file(project, zones[0].rpartition("-")[0], zones, tpu_type)
    parse.parse_text(text, str(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    described = json.dumps(parse.json_schema(), indent=1)
    (file.parent / starter_file.SCHEMA_FILE).write_text(f"{described}\n")
    written = {"file": str(file), "schema": str(file.parent / starter_file.SCHEMA_FILE)}
    output.print_result(written, f"wrote {file} and {starter_file.SCHEMA_FILE}")
    output.print_status("  next: `tpu cluster plan --rehearse` shows what it creates and costs")


@click.command(epilog="\b\nExample:\n  tpu cluster plan --rehearse\n")
@rehearse_option
@json_option
def plan(rehearse: bool) -> None:
    """Show what apply would change, with the cost per hour. Changes nothing.

    Also shows drift: what was changed outside. The generated Terraform files are written beside
    cluster.yaml, to read and to commit; state never is.
    """
    file, environment = read_environment()
    _warn(file, environment)
    with _planner(file, environment, rehearse) as runner:
        planned = [runner.plan(stage) for stage in StageName]
    _show(environment, planned)
    for stage in planned:
        _check_applicable(file, environment, stage)


@click.command(epilog="\b\nExample:\n  tpu cluster apply --file lab.yaml\n")
@rehearse_option
@yes_option
@json_option
def apply(rehearse: bool, yes: bool) -> None:
    """Create or change the environment, stage by stage, after showing each plan.

    After an interruption or an error, give the same command again: it continues.
    """
    file, environment = read_environment()
    _warn(file, environment)
    with _runner(file, environment, rehearse) as runner:
        check = partial(_check_applicable, file, environment)
        changed = _carry_out(runner, list(StageName), yes, destroy=False, check=check)
        _save_outputs(runner)
    output.print_result({"changes": changed}, f"applied {len(changed)} changes")
    if not rehearse:
        login = install.login_command(environment)
        output.print_status(f"  next: {login}, `tpu cluster install`")


@click.command(epilog="\b\nExample:\n  tpu cluster destroy --rehearse\n")
@rehearse_option
@click.option("--bootstrap", is_flag=True, help="Also the service account and state bucket.")
@yes_option
@json_option
def destroy(rehearse: bool, bootstrap: bool, yes: bool) -> None:
    """Delete the environment, last stage first, after showing what goes.

    Refused while slices of jobs are live, and while cluster.yaml has deletion_protection: set it
    to false and apply first.
    """
    file, environment = read_environment()
    apply_command = f"`tpu cluster apply{' --rehearse' if rehearse else ''}`"
    if environment.deletion_protection:
        raise BadInput(
            f"{file}: deletion_protection: true protects this environment\n"
            f"  next: write deletion_protection: false, then {apply_command}, then this again"
        )
    chosen = [stage for stage in reversed(StageName) if bootstrap or stage != StageName.BOOTSTRAP]
    with _runner(file, environment, rehearse) as runner:
        rest = [stage for stage in chosen if stage != StageName.BOOTSTRAP]
        if not rehearse:
            live_slices.check(environment)
        _check_unprotected(runner, apply_command)
        deleted = _carry_out(runner, rest, yes, destroy=True)
        if bootstrap:
            if not rehearse:
                _leave_state_bucket(runner, environment)
            deleted += _carry_out(runner, [StageName.BOOTSTRAP], yes, destroy=True)
    output.print_result({"changes": deleted}, f"deleted {len(deleted)} resources")


def _check_unprotected(runner: StageRunner, apply_command: str) -> None:
    """Before anything is deleted: the file may have been changed and not applied."""
    planned = runner.plan(StageName.INFRASTRUCTURE, destroy=True)
    for change in planned.changes:
        if change.protected:
            raise BadInput(
                f"{change.noun} {change.name} is still protected; nothing was deleted\n"
                f"  next: {apply_command}, then this again"
            )


def _check_applicable(file: Path, environment: Environment, planned: StagePlan) -> None:
    """Before anything of the stage is changed: what Google would refuse halfway."""
    if planned.subnet_ranges:
        found = checks.live_range_problems(environment, planned.subnet_ranges)
        if problems := [(f"{file}: {path}", problem) for path, problem in found]:
            raise InvalidSettings(problems)
    for change in planned.changes:
        if change.protected:
            raise BadInput(
                f"{plan_summary.sentence(change)}: refused, its deletion_protection is true\n"
                f"  next: undo this change in {file}"
            )


def _warn(file: Path, environment: Environment) -> None:
    for line in checks.zone_warnings(environment):
        output.print_status(f"warning: {file}: {line}")


def _carry_out(
    runner: StageRunner,
    chosen: Sequence[StageName],
    yes: bool,
    *,
    destroy: bool,
    check: Callable[[StagePlan], None] = lambda planned: None,
) -> list[Change]:
    """Plan, show, ask and apply, one stage after the other."""
    done: list[Change] = []
    for stage in chosen:
        planned = runner.plan(stage, destroy=destroy)
        check(planned)
        if not planned.changes:
            output.print_status(f"{stage}: {'nothing left' if destroy else 'up to date'}")
            continue
        _show_changes(planned.changes, output.print_status)
        output.confirm(f"{'Delete all of' if destroy else 'Apply'} {stage}?", yes)
        runner.apply(planned, output.print_status)
        done += planned.changes
    return done


def read_environment() -> tuple[Path, Environment]:
    """The file that `tpu cluster --file` names, and what it says."""
    file: Path = shared_option("file")
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        hint = "`tpu cluster init --project PROJECT --zone ZONE` writes one"
        raise unreadable(file, error, hint=hint) from error
    return file, parse.parse_text(text, str(file))


@contextlib.contextmanager
def _planner(file: Path, environment: Environment, rehearse: bool) -> Iterator[StageRunner]:
    """For an environment that does not exist yet, with empty state in a temporary folder."""
    from tpufleet_gke.environment.terraform import runner, state_bucket

    if rehearse or state_bucket.exists(environment):
        with _runner(file, environment, rehearse) as found:
            yield found
        return
    with tempfile.TemporaryDirectory(prefix="tpufleet-plan-") as name:
        folder = Path(name)
        runner.write_stages(folder, stages.all_files(environment, name))
        yield runner.StageRunner(program=runner.find_program(os.environ), folder=folder)


def _leave_state_bucket(runner: StageRunner, environment: Environment) -> None:
    """State moves to this machine before the bucket that holds it is deleted."""
    folder = str((runner.folder / ".terraform-state").resolve())
    files = stages.all_files(environment)
    for name, text in stages.stage_files(environment, StageName.BOOTSTRAP, folder).items():
        files[f"{StageName.BOOTSTRAP}/{name}"] = text
    runner.move_state(StageName.BOOTSTRAP, files)


@contextlib.contextmanager
def _runner(file: Path, environment: Environment, rehearse: bool) -> Iterator[StageRunner]:
    from tpufleet_gke.environment.terraform import runner, state_bucket

    folder = file.parent
    program = runner.find_program(os.environ)
    if not rehearse:
        # State is kept in the bucket from the beginning; the first stage then manages the bucket.
        state_bucket.ensure(environment, output.print_status)
        runner.write_stages(folder, stages.all_files(environment))
        yield runner.StageRunner(program=program, folder=folder)
        return
    try:
        from tpufleet_testbed.terraform.emulated_google_cloud import EmulatedGoogleCloud
        from tpufleet_testbed.terraform.google_provider import serve
    except ModuleNotFoundError as error:
        following = install_command("tpufleet[testbed]")
        raise BadInput(f"--rehearse needs {error.name}\n  next: {following}") from error
    work = (folder / REHEARSAL).resolve()
    runner.write_stages(work, stages.all_files(environment, str(work)))
    with serve(EmulatedGoogleCloud(work / "google-cloud.json")) as variables:
        environ = {**os.environ, **variables}
        yield runner.StageRunner(program=program, folder=work, environ=environ)


def _save_outputs(runner: StageRunner) -> None:
    folder = runner.folder / "outputs"
    folder.mkdir(exist_ok=True)
    for stage in StageName:
        path = folder / f"{stage}.json"
        path.write_text(json.dumps(runner.outputs(stage), indent=1, sort_keys=True) + "\n")


def _show(environment: Environment, planned: Sequence[StagePlan]) -> None:
    found = [change for stage in planned for change in stage.changes]
    drifted = [change for stage in planned for change in stage.drift]
    estimate = costs.estimate(environment)
    if output.printed_json({"changes": found, "drift": drifted, "cost": estimate}):
        return
    if drifted:
        click.echo("changed outside:")
        _show_changes(drifted)
    _show_changes(found)
    output.print_table(
        ("PART", "WHAT", "USD/HOUR IDLE", "USD/HOUR FULL"),
        [(line.name, line.what, _usd(line.least_usd), _usd(line.most_usd)) for line in estimate],
        "",
    )
    least = sum(line.least_usd or 0 for line in estimate)
    most = sum(line.most_usd or 0 for line in estimate)
    unknown = [line.name for line in estimate if line.most_usd is None]
    without = f", without {', '.join(unknown)} (price not known)" if unknown else ""
    click.echo(
        f"cost: {_usd(least)} USD/hour idle, {_usd(most)} USD/hour with every pool full{without}; "
        "list prices, see `tpu cost`"
    )
    live = [stage.subnet_ranges["pods"] for stage in planned if stage.subnet_ranges]
    addresses = live[0] if live else capacity.pods_range(environment)
    click.echo(f"room: {capacity.max_nodes(environment)} nodes, pods in {addresses}")


def _show_changes(found: Sequence[Change], show: Callable[[str], None] = click.echo) -> None:
    for line, usd in plan_summary.sentences(found):
        cost = "" if usd == 0.0 else f"  [{_signed(usd)} USD/hour]"
        show(f"{line}{cost}")
    kinds = {
        action: sum(change.action is action for change in found) for action in plan_summary.Action
    }
    summary = ", ".join(f"{count} to {action}" for action, count in kinds.items() if count)
    show(summary or "no changes")


def _usd(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"


def _signed(value: float | None) -> str:
    return "?" if value is None else f"{value:+.2f}"

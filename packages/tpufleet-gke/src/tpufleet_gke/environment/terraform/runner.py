"""Runs Terraform or OpenTofu on the generated stages: plan, apply, destroy, drift.

State is written after every resource, so an interrupted apply or destroy continues where it
stopped when the same command is given again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpufleet.errors import BadInput, FleetError
from tpufleet_gke.environment.terraform import plan_summary
from tpufleet_gke.environment.terraform.plan_summary import Change
from tpufleet_gke.environment.terraform.stages import StageName

PROGRAMS = ("tofu", "terraform")
LOST_PLUGIN = "request was cancelled"
PLAN_FILE = "stage.tfplan"
Progress = Callable[[str], None]


class TerraformFailed(FleetError):
    """Terraform or OpenTofu ended with an error."""


class PluginLost(TerraformFailed):
    """It lost contact with its own plugin, as on a machine that stood still meanwhile."""


def find_program(environ: Mapping[str, str]) -> str:
    chosen = environ.get("TPUFLEET_TERRAFORM")
    names = [chosen] if chosen else PROGRAMS
    for name in names:
        path = shutil.which(name, path=environ.get("PATH"))
        if path:
            return path
    raise BadInput(
        f"{' or '.join(names)} not found\n"
        "  next: install OpenTofu (https://opentofu.org/docs/intro/install) or Terraform, or set "
        "TPUFLEET_TERRAFORM to its path"
    )


def write_stages(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """All stages; the files that changed. Those of a former cluster.yaml are removed."""
    changed = []
    for stage in StageName:
        for old in sorted((folder / stage).glob("*.tf")):
            if f"{stage}/{old.name}" not in files:
                old.unlink()
                changed.append(old)
    for name, text in files.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            changed.append(path)
    return changed


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    stage: StageName
    changes: Sequence[Change]
    drift: Sequence[Change]
    subnet_ranges: Mapping[str, str] = field(default_factory=dict)  # as they are, or will be made


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRunner:
    program: str
    folder: Path
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def plan(self, stage: StageName, *, destroy: bool = False) -> StagePlan:
        """What apply would change, and what was changed outside. Changes nothing."""
        self._run(stage, "init", "-reconfigure")
        extra = ["-destroy"] if destroy else []
        plan = ("plan", "-lock-timeout=60s", f"-out={PLAN_FILE}", *extra)
        try:
            self._run(stage, *plan)
        except PluginLost:
            self._run(stage, *plan)
        shown = json.loads(self._run(stage, "show", "-json", PLAN_FILE, plain=True))
        return StagePlan(
            stage=stage,
            changes=plan_summary.changes(stage, shown),
            drift=plan_summary.drift(stage, shown),
            subnet_ranges=plan_summary.subnet_ranges(shown),
        )

    def apply(self, plan: StagePlan, progress: Progress) -> None:
        """Exactly what the plan shows, and nothing if the state changed since."""
        total = len(plan.changes)
        names = {change.address: change for change in plan.changes}
        done = 0
        with contextlib.closing(self._stream(plan.stage, "apply", "-json", PLAN_FILE)) as events:
            for event in events:
                hook = event.get("hook") or {}
                change = names.get((hook.get("resource") or {}).get("addr", ""))
                if change is None:
                    continue
                seconds = hook.get("elapsed_seconds", 0)
                if event["type"] == "apply_complete":
                    done += 1
                    sentence = plan_summary.sentence(change)
                    progress(f"{plan.stage}: {done}/{total} {sentence} ({seconds:.0f} s)")
                elif event["type"] == "apply_progress":
                    progress(f"{plan.stage}: {change.noun} {change.name} … {seconds:.0f} s")

    def move_state(self, stage: StageName, files: Mapping[str, str]) -> None:
        """To the backend of these files, from where it is kept now."""
        self._run(stage, "init", "-reconfigure")
        write_stages(self.folder, files)
        self._run(stage, "init", "-migrate-state", "-force-copy")

    def outputs(self, stage: StageName) -> dict[str, Any]:
        shown = json.loads(self._run(stage, "output", "-json", plain=True))
        return {name: entry["value"] for name, entry in shown.items()}

    def _command(self, stage: StageName, *args: str, plain: bool = False) -> list[str]:
        flags = [] if plain else ["-input=false"]
        name, *rest = args
        return [self.program, f"-chdir={self.folder / stage}", name, *flags, *rest]

    def _environ(self) -> dict[str, str]:
        quiet = {"TF_IN_AUTOMATION": "1", "CHECKPOINT_DISABLE": "1", "TF_CLI_ARGS": "-no-color"}
        # A path to a file that does not exist is only a warning, printed among the results.
        configured = self.environ.get("TF_CLI_CONFIG_FILE")
        if configured and not Path(configured).exists():
            quiet["TF_CLI_CONFIG_FILE"] = os.devnull
        return {**self.environ, **quiet}

    def _run(self, stage: StageName, *args: str, plain: bool = False) -> str:
        done = subprocess.run(
            self._command(stage, *args, plain=plain),
            env=self._environ(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            output = done.stderr or done.stdout
            error = PluginLost if LOST_PLUGIN in output else TerraformFailed
            raise error(_message(self.program, stage, args[0], output))
        return done.stdout

    def _stream(self, stage: StageName, *args: str) -> Generator[dict[str, Any], None, None]:
        """Events as they happen. Ctrl-C reaches the program too, which then saves its state."""
        errors: list[str] = []
        with subprocess.Popen(
            self._command(stage, *args), env=self._environ(), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    try:
                        event = json.loads(line)
                    except ValueError:
                        errors.append(line.strip())
                        continue
                    if event.get("type") == "diagnostic" and event.get("@level") == "error":
                        errors.append(_diagnostic(event.get("diagnostic") or {}))
                    yield event
            finally:
                # After Ctrl-C too: until the program has saved its state and ended.
                process.stdout.read()
        if process.returncode:
            raise TerraformFailed(_message(self.program, stage, args[0], "\n".join(errors)))


def _diagnostic(diagnostic: Mapping[str, Any]) -> str:
    return ": ".join(filter(None, (diagnostic.get("summary"), diagnostic.get("detail"))))


def _message(program: str, stage: StageName, command: str, output: str) -> str:
    lines = [line.strip(" ╷│╵") for line in output.splitlines()]
    evidence = "\n".join(f"  {line}" for line in lines if line)
    return (
        f"{Path(program).name} {command} failed in {stage}\n{evidence}\n"
        "  next: correct the cause, then give the same command again; it continues from here"
    )

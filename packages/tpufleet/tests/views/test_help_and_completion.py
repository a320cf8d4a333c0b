"""`tpu --help` fits one screen, `tpu help` leads on, and shells complete names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import click
import pytest

from tests.docs.test_commands import check, simple_commands
from tests.views.cli_runner import Tpu
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.reservations import Reservation
from tpufleet.stores.base import ChangeSet
from tpufleet.views.cli import completion_values, registry
from tpufleet.views.cli.vm.group import vm


def test_help_fits_one_screen_and_names_every_command(alone: Tpu):
    printed = alone.ok("--help")
    lines = printed.splitlines()
    assert 24 <= len(lines) <= 40
    assert all(len(line) <= 80 for line in lines)
    shown = {name for name, lazy in registry.commands().items() if not lazy.hidden}
    assert shown <= set(re.findall(r"[a-z][a-z-]*", printed))
    everyday = [line.split()[0] for line in lines[lines.index("Everyday:") + 1 :] if line[:2]]
    assert everyday[:3] == ["run", "submit", "jobs"]


def test_node_commands_are_one_group(alone: Tpu):
    printed = alone.ok("vm", "--help")
    assert all(f"\n  {name} " in printed for name in vm.lazy_commands)
    assert not vm.lazy_commands.keys() & {"run", "jobs"}
    assert alone.ok("help", "vm", "apply") == alone.ok("vm", "apply", "--help")


def examples() -> Iterator[str]:
    """The lines at the end of the help of each command."""
    for name, lazy in registry.commands().items():
        for command in walk(lazy.load(name)):
            lines = (command.epilog or "").replace("\\\n", " ").splitlines()
            yield from (line.strip() for line in lines if line.startswith("  tpu "))


def walk(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from walk(child)


@pytest.mark.parametrize("line", sorted({*examples()}))
def test_an_example_is_a_valid_command_line(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r"\S+\.yaml", line):
        Path(name).touch()
    for arguments in simple_commands(line):
        check(arguments[1:])


def test_there_are_at_most_45_commands():
    shown = [lazy for lazy in registry.commands().values() if not lazy.hidden]
    assert len(shown) <= 45


@pytest.mark.parametrize("name", registry.RENAMED)
def test_earlier_names_of_commands_are_understood(alone: Tpu, name):
    answer = alone(*name.split(), "--help")
    assert answer.exit_code == 0
    assert answer.stdout == alone.ok(*registry.RENAMED[name].split(), "--help")
    assert f"is now `tpu {registry.RENAMED[name]}`" in answer.stderr


@pytest.mark.parametrize(
    ("typed", "today"),
    [
        ("tag train a b --remove c", "train --tag a --tag b --remove c"),
        ("tag --query owner:me a --yes", "--tag a --query owner:me --yes"),
        ("note train two words", "train --note|two words"),
        ("note train --clear", "train --note|"),
        ("rename train other", "train --name other"),
        ("priority train -- -5", "train --priority -5"),
    ],
)
def test_earlier_ways_to_edit_a_job_are_understood(typed, today):
    name, *words = typed.split()
    expected, bar, last = today.partition("|")
    assert registry.edit_arguments(registry.EDITS[name], words) == [
        "edit", *expected.split(), *[last] * bool(bar)
    ]  # fmt: skip


class Shell:
    """Asks a real shell what it would propose for a command line."""

    def __init__(self, folder: Path, tpu: Tpu) -> None:
        self.folder = folder / "bin"
        self.folder.mkdir()
        program = self.folder / "tpu"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tpufleet "$@"\n')
        program.chmod(0o755)
        path = f"{self.folder}:{os.environ['PATH']}"
        self.environ = {**os.environ, **tpu.environ, "PATH": path}

    def run(self, program: str, *args: str) -> str:
        done = subprocess.run(
            [program, *args], env=self.environ, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        return done.stdout

    def bash(self, line: str) -> list[str]:
        words = line.split(" ")
        array = " ".join(f"'{word}'" for word in words)
        script = (
            'eval "$(tpu config completion bash)"\n'
            f"COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; COMPREPLY=()\n"
            '_tpu_completion tpu\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
        )
        return self.run("bash", "--norc", "-c", script).split()


@pytest.fixture
def shell(world, tpu: Tpu, tmp_path: Path) -> Shell:
    world.submit("job-1", name="resnet-large")
    world.submit("job-2", name="resnet-small")
    lab = Pool(name="lab", provider="local", accelerator="v5litepod-16", largest=1)
    world.store.commit(ChangeSet(pools=[lab]))
    tpu.ok("config", "view", "save", "bad", "state:failed")
    now, ends = world.clock.now(), world.clock.now() + timedelta(hours=1)
    reservation = Reservation(
        id="3f9a0000",
        pool="lab",
        slices=1,
        owner="mel",
        starts_at=now,
        ends_at=ends,
        created_at=now,
    )
    world.store.update_document(Reservation, reservation.id, lambda _: reservation)
    return Shell(tmp_path, tpu)


@pytest.mark.parametrize(
    ("line", "proposed"),
    [
        ("tpu comp", {"compare"}),
        ("tpu vm re", {"restart", "repair"}),
        ("tpu why resnet", {"resnet-large", "resnet-small"}),
        ("tpu run v5e-25", {"v5e-256"}),
        ("tpu queue --pool ", {"lab"}),
        ("tpu pool create lab --zone us-west4-", {"us-west4-a"}),
        ("tpu run v5e-8 --poo", {"--pool"}),
        ("tpu run v5e-8 tag=x --pool ", {"lab"}),
        ("tpu resume resnet-large w", set()),
        ("tpu config view delete b", {"bad"}),
        ("tpu config set time", {"time_zone"}),
        ("tpu reserve extend ", {"3f9a0000"}),
        ("tpu inventory set ", {"lab"}),
    ],
    ids=[
        "command",
        "node command",
        "job",
        "type",
        "pool",
        "zone",
        "option",
        "after a former word",
        "resume",
        "view",
        "setting",
        "reservation",
        "inventory",
    ],
)
def test_bash_completes(shell: Shell, line, proposed):
    assert set(shell.bash(line)) == proposed


@pytest.mark.parametrize("name", ["zsh", "fish"])
def test_other_shells_accept_their_script(shell: Shell, name, tmp_path):
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    script = tmp_path / f"tpu.{name}"
    script.write_text(shell.run("tpu", "config", "completion", name))
    shell.run(name, "-n", str(script))
    if name == "fish":
        proposed = shell.run(name, "-c", f"source {script}; complete -C 'tpu why resnet'")
        assert "resnet-large" in proposed
        commands = shell.run(name, "-c", f"source {script}; complete -C 'tpu '")
        texts = dict(line.split("\t", 1) for line in commands.splitlines() if "\t" in line)
        assert any("," in text for text in texts.values()), "descriptions end at a comma"


def test_without_a_server_nothing_is_proposed_and_nothing_started(alone, monkeypatch, tmp_path):
    for name, value in alone.environ.items():
        monkeypatch.setenv(name, value)
    assert not completion_values.job_names()
    assert not (tmp_path / "state").exists()


def commands_with_parameters(
    group: click.Group, path: tuple[str, ...] = ()
) -> list[tuple[str, click.Parameter]]:
    found = []
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if isinstance(command, click.Group):
            found += commands_with_parameters(command, (*path, name))
        found += [(" ".join((*path, name)), parameter) for parameter in command.params]
    return found


def test_every_job_type_pool_and_zone_is_completed():
    """By the name that help shows, so that a new command is not forgotten."""
    shown = {"JOB", "JOB…", "[JOB]", "[JOB…]", "JOB|SLICE", "TYPE", "POOL", "ZONE", "FILE…"}
    for path, parameter in commands_with_parameters(registry.root()):
        metavar = parameter.metavar or (parameter.name or "").upper()
        if metavar in shown and parameter.type is click.STRING:
            assert parameter.name in completion_values.BY_PARAMETER, f"tpu {path}: {parameter.name}"

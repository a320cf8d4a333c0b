"""Every command name of the job manager that this program replaces still leads somewhere."""

from __future__ import annotations

import re

import pytest

from tests.views.cli_runner import Tpu
from tpufleet.views.cli.registry import DESTRUCTIVE, RENAMED, commands
from tpufleet.views.cli.vm.group import vm
from tpufleet_migration.former_names import FORMER_NAMES, Renamed, Unsupported

VM_COMMANDS = vm.lazy_commands

_DISPATCHED = """
run check check-simp monitor caj maj add-tag resume rerun kill kill-job -k -kj kill-remote
kill-window -kw ignore-error get-stage-dir ack clean clear clear-all clear-finished clear-error
-czw -czj change-ip init
set-cur set-dir del-dir swap-dir ls lsdir get-dir
get-settings set-settings reset-settings reset-window-num reset-window
-a -alias add-config-alias -sa -la show-config-alias del-config-alias
apply reapply applyy reapplyy apply-norm reapply-norm delete restart check-status -cktpu describe
-dtpu check-env mount-disk mount-disk-new set-wandb solve solve-env test lian
-ta -ata add-tpu-alias -lta -sta register add-applied-tpu add-applied -atpu del-registered
del-register del-reg del-info rtw fang fmd keng zhan rm-lock
find rel release ssn asn uss upd-status-spreadsheet gtis twsi
queue vq dequeue dq dqr
upd-log upd-staging-info finish-job fail-job
cp cc cca clean-eu clean-us
add-user del-user list-users -lu register-web lock unlock rl lock-data unlock-data -smc -gmc -agc
-mgc -Ml -Mc debug-stats debug-kill help -h tldr check-rules
"""
SPELLINGS = _DISPATCHED.split()


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_former_spelling_runs_todays_command_or_says_what_to_use(alone: Tpu, spelling):
    former = FORMER_NAMES.get(spelling)
    answer = alone(spelling, "--help")
    if isinstance(former, Unsupported):
        assert answer.exit_code == 2
        assert answer.stderr.startswith(f"error: no command {spelling!r}: {former.reason}\n  next:")
    elif isinstance(former, Renamed):
        assert answer.exit_code == 0, answer.output
        assert f"hint: `tpu {spelling}` is now `tpu {' '.join(former.arguments)}`" in answer.stderr
    else:
        assert spelling in {*commands(), *RENAMED, "check", "help", "-h", "tldr"}
        assert answer.exit_code == 0
    assert "Usage: tpu" in answer.stdout or isinstance(former, Unsupported)


def test_no_former_name_hides_a_command_of_today():
    assert not FORMER_NAMES.keys() & commands().keys()
    assert FORMER_NAMES.keys() <= {*SPELLINGS, "fleet"}


COMMAND_IN_HINT = re.compile(r"`tpu ([a-z-]+)")


def test_hints_name_commands_that_exist():
    for former in FORMER_NAMES.values():
        text = former.note if isinstance(former, Renamed) else f"{former.reason} {former.instead}"
        assert set(COMMAND_IN_HINT.findall(text)) <= commands().keys()
        assert not isinstance(former, Renamed) or former.arguments[0] in commands()


def test_help_of_a_command_can_be_asked_for_by_name(alone: Tpu):
    assert alone.ok("help", "jobs") == alone.ok("jobs", "--help")
    assert alone.ok("help") == alone.ok("--help")


@pytest.mark.parametrize(
    ("word", "advice"),
    [("stop", "`tpu cancel JOB` ends a job"), ("wait", "`tpu logs -f JOB` follows a job")],
)
def test_words_of_other_schedulers_are_answered(alone: Tpu, word, advice):
    answer = alone(word)
    assert answer.exit_code == 2
    assert (
        answer.stderr.startswith(f"error: unknown command {word!r}; ") and advice in answer.stderr
    )


def misspellings(word: str) -> list[str]:
    """One letter missing, doubled or swapped, and one of another command's beginning."""
    return [
        *(word[:at] + word[at + 1 :] for at in range(len(word))),
        *(word[:at] + word[at] + word[at:] for at in range(len(word))),
        *(word[:at] + word[at + 1] + word[at] + word[at + 2 :] for at in range(len(word) - 1)),
        "de" + word[1:],
    ]


@pytest.mark.parametrize("word", sorted(DESTRUCTIVE))
def test_a_misspelling_never_leads_to_a_destructive_command(alone: Tpu, word):
    for wrong in misspellings(word):
        if wrong in commands() or wrong in FORMER_NAMES:
            continue
        suggested = re.findall(r"did you mean `tpu ([a-z-]+)`", alone(wrong).stderr)
        assert not {*suggested} & DESTRUCTIVE, wrong


@pytest.mark.parametrize("word", sorted(DESTRUCTIVE & VM_COMMANDS.keys()))
def test_a_misspelled_node_command_never_leads_to_a_destructive_one(alone: Tpu, word):
    for wrong in misspellings(word):
        if wrong not in VM_COMMANDS:
            suggested = re.findall(r"did you mean `tpu vm ([a-z-]+)`", alone("vm", wrong).stderr)
            assert not {*suggested} & DESTRUCTIVE, wrong


def test_destructive_commands_exist():
    assert {*commands(), *RENAMED, *VM_COMMANDS} >= DESTRUCTIVE

"""`tpu extract`: the group of its commands.

Commands are imported when they are called: a worker runs `tpu extract run` and waits for it to
start. Other distributions add commands with the entry-point group `tpufleet.extract`; one with the
name of ours replaces it.
"""

from __future__ import annotations

import errno
from typing import Any

import click

from tpufleet.entry_points import registered
from tpufleet.errors import not_installed
from tpufleet.runtime.units import DamagedRecord
from tpufleet.views.cli.registry import LazyCommand, LazyGroup
from tpufleet_activations.cli.interrupts import delivered_interrupts
from tpufleet_activations.cli.option_plugins import normalize_option
from tpufleet_activations.formatting import example_epilog

INTERRUPTED = 130  # exit status after SIGINT, by shell convention
CLI = "tpufleet_activations.cli"
COMMANDS = {
    "plan": LazyCommand("Estimate an extraction, and write its plan.", f"{CLI}.plan:plan"),
    "run": LazyCommand("Run a plan until it is complete.", f"{CLI}.run:run"),
    "status": LazyCommand("Show the progress of datasets.", f"{CLI}.dataset:status"),
    "show": LazyCommand("Show a stored sample.", f"{CLI}.dataset:show"),
    "stats": LazyCommand("Show statistics of each site.", f"{CLI}.dataset:stats"),
    "latents": LazyCommand("Show where latents are strongest.", f"{CLI}.dataset:show_latents"),
    "verify": LazyCommand("Check samples and checksums.", f"{CLI}.dataset:verify"),
    "repair": LazyCommand("Extract damaged units again.", f"{CLI}.dataset:repair"),
    "export": LazyCommand("Export to Hugging Face datasets.", f"{CLI}.dataset:export"),
    "deploy": LazyCommand("Run a fleet of workers as jobs.", f"{CLI}.deploy:deploy"),
    "board": LazyCommand("Show that fleet.", f"{CLI}.deploy:board"),
}
# What an interrupted command leaves, by name. `run` says more, and `status --watch` ends so.
UNCHANGED = "the dataset is unchanged"
AGAIN = "the result is incomplete; run the same command again"
STATE_AFTER_INTERRUPT = {
    "plan": AGAIN,
    "export": "the export is incomplete; delete its folder, and export again",
    "import": AGAIN,
    "streams": AGAIN,
    "verify": UNCHANGED,
    "stats": UNCHANGED,
    "latents": UNCHANGED,
    "show": UNCHANGED,
    "repair": "units that were reopened are extracted by `tpu extract run`, or another repair",
}


class ExtractGroup(LazyGroup):
    """Shows errors of disks and records, and missing packages, as messages."""

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        lazy = self.lazy_commands.get(name)
        return None if lazy is None else lazy.load(f"extract {name}")

    def invoke(self, context: click.Context) -> Any:
        try:
            with delivered_interrupts():
                return super().invoke(context)
        except KeyboardInterrupt:
            state = STATE_AFTER_INTERRUPT.get(context.invoked_subcommand or "")
            if state is None:
                raise
            click.echo(f"\ninterrupted; {state}", err=True)
            context.exit(INTERRUPTED)
        except DamagedRecord as error:
            raise click.ClickException(
                f"{error}; run `tpu extract repair` with the folder of the dataset"
            ) from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
                raise click.ClickException(
                    "no space left on device, perhaps for downloads or temporary files; free some, "
                    "or set XDG_CACHE_HOME and TMPDIR to folders on a larger disk"
                ) from error
            if error.filename is None:
                raise
            raise click.ClickException(f"{error.filename}: {error.strerror}") from error
        except ModuleNotFoundError as error:
            problem = str(not_installed(str(error.name), "tpufleet[extract]"))
            raise click.ClickException(problem) from error


extract = ExtractGroup(
    name="extract",
    sections={
        "Commands": {
            **COMMANDS,
            **{k: v for table in registered("tpufleet.extract") for k, v in table.items()},
        }
    },
    help="Extract activations of a language model, each sample exactly once.",
    epilog=example_epilog("tpu extract plan acts --model ./gpt2 --data prompts.jsonl"),
    context_settings={"token_normalize_func": normalize_option},
)

"""Running the `tpu` command: the exit status, and how an error is reported to the user."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import click

from tpufleet.errors import BadInput, FleetError
from tpufleet.views.cli import registry
from tpufleet.views.cli.usage_errors import HintedUsageError

FAILED = 1
INVALID_INPUT = 2
INTERRUPTED = 130
# What people mean who give these commands one word too many, or too few.
MEANT = {
    "tpu status": "`tpu show JOB` shows a job",
    "tpu show": "it shows one job; `tpu jobs 'id:A,B'` lists several",
    "tpu cost budget": "`budgets` in the config file of the server sets them",
    "tpu config set": "`tpu config` lists the settings; for example `tpu config set time_zone us`",
}
SYNONYMS = {"create": "add", "new": "add", "ls": "list"}


def run(args: Sequence[str]) -> int:
    """The exit status: 0 success, 1 failure, 2 invalid input, 130 interrupted."""
    try:
        status = registry.root().main(
            list(args) or ["--help"], prog_name="tpu", standalone_mode=False
        )
        return status if isinstance(status, int) else 0
    except click.UsageError as error:
        return _report_usage(error)
    except click.ClickException as error:
        return _report(error.format_message(), error, error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BadInput as error:
        return _report(str(error), error, INVALID_INPUT)
    except FleetError as error:
        return _report(str(error) or type(error).__name__, error, FAILED)
    except Exception as error:  # outermost handler: users get a message, not a traceback
        message = (
            f"unexpected {type(error).__name__}: {error}; set TPUFLEET_DEBUG=1 for the traceback"
        )
        return _report(message, error, FAILED)


def _report_usage(error: click.UsageError) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # a group without a subcommand
        error.show()
        return INVALID_INPUT
    message = error.format_message().rstrip(".")
    path = error.ctx.command_path if error.ctx is not None else "tpu"
    if isinstance(error, click.NoSuchOption) and path == "tpu run":
        message += "; put options of your own command after `--`; other fields: --set FIELD=VALUE"
    hint = "" if isinstance(error, HintedUsageError) else f"; {_meant(error, path)}"
    return _report(message[:1].lower() + message[1:] + hint, error, INVALID_INPUT)


def _meant(error: click.UsageError, path: str) -> str:
    argument = isinstance(error, click.MissingParameter) or "extra argument" in error.message
    if argument and path in MEANT:
        return MEANT[path]
    unknown = re.match(r"No such command '(.+)'", error.message)
    if unknown and error.ctx is not None and isinstance(error.ctx.command, click.Group):
        meant = SYNONYMS.get(unknown[1], "")
        if meant in error.ctx.command.list_commands(error.ctx):
            return registry.did_you_mean(path, meant)
    return f"see `{path} --help`"


def _report(message: str, error: BaseException, status: int) -> int:
    """Indented lines (evidence, next step) belong to the error above them."""
    from tpufleet import config  # only needed for errors

    if config.debug_enabled(os.environ):
        import traceback

        traceback.print_exception(error)
    from tpufleet.views import text

    for line in text.without_control_characters(message).splitlines():
        click.echo(line if line.startswith("  ") else f"error: {line}", err=True)
    return status

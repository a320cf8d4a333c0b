"""`tpu config completion`."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from tpufleet.views.cli.registry import COMPLETION_VARIABLE
from tpufleet.views.cli.usage_errors import HintedUsageError

SHELLS = ("bash", "zsh", "fish")


@click.command(
    epilog='\b\nExamples:\n  eval "$(tpu config completion bash)"     # in ~/.bashrc\n'
    '  eval "$(tpu config completion zsh)"      # in ~/.zshrc, after compinit\n'
    "  tpu config completion fish > ~/.config/fish/completions/tpu.fish\n",
)
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@click.pass_context
def completion(context: click.Context, shell: str | None) -> None:
    """Print the completion script of SHELL (default: the shell that you use).

    It completes commands, options, and the names of your jobs, TPU types, pools and zones. Names of
    jobs and pools come from the server, which is given one second to answer.
    """
    shell = shell or Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        raise HintedUsageError("which shell? write `tpu config completion bash`, zsh or fish")
    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    writer = kind(context.find_root().command, {}, "tpu", COMPLETION_VARIABLE)
    template = writer.source_template
    if shell == "fish":  # click's script cuts descriptions at their first comma
        template = template.replace('string split ","', 'string split --max 1 ","')
    script = template % writer.source_vars()
    click.echo(script)

"""Inputs of the tiny test models: a character tokenizer, and ARC tasks."""

from __future__ import annotations

import json
from pathlib import Path

# Several devices, and no expensive optimization of models this small.
SMALL_DEVICES = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true",
}
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n"
    "{% endfor %}"
)


def write_tokenizer(folder: Path, vocabulary: int = 61) -> None:
    """A character tokenizer with ids modulo the tiny models' vocabulary."""
    import string

    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = string.ascii_letters + string.digits + " .,#|:x\n`<>_-/'&"
    table = {letter: 1 + number % (vocabulary - 1) for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel({**table, "?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def task(number: int, tests: int = 1) -> dict:
    grid = [[(number + row * column) % 10 for column in range(3)] for row in range(2)]
    pair = {"input": grid, "output": [row[::-1] for row in grid]}
    return {"task_id": f"task_{number:08x}", "train": [pair, pair], "test": [pair] * tests}


def tpu(*arguments) -> tuple[int, str]:
    """The exit status and the output of `tpu extract …`, run in this process."""
    from click.testing import CliRunner

    from tpufleet.errors import BadInput, FleetError
    from tpufleet_activations.cli.group import extract

    result = CliRunner().invoke(extract, [str(argument) for argument in arguments])
    if isinstance(result.exception, FleetError):  # as `tpu` reports it
        status = 2 if isinstance(result.exception, BadInput) else 1
        return status, f"{result.output}Error: {result.exception}\n"
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output

"""A page that shows where latents are strongest: contexts with their activations highlighted."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers

from tpufleet_activations.io import latents
from tpufleet_activations.io.dataset_reader import Dataset
from tpufleet_activations.io.latents import LatentIndex

BEFORE, AFTER = 24, 12  # tokens that are shown around the strongest one
CONTEXTS = 16
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c2430; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
p.count { color: #5b6676; margin: 0 0 0.5rem; }
table { border-collapse: collapse; width: 100%; }
td { border-top: 1px solid #e3e7ed; padding: 0.35rem 0.5rem; vertical-align: top; }
td.value { text-align: right; font-variant-numeric: tabular-nums; color: #5b6676; width: 4rem; }
td.place { color: #5b6676; white-space: nowrap; width: 8rem; }
span { border-radius: 2px; white-space: pre-wrap; } span.strongest { outline: 1px solid #b3541e; }
"""


class Token(NamedTuple):
    text: str
    value: float
    strongest: bool


class ShownContext(NamedTuple):
    value: float
    sample: int
    position: int
    tokens: list[Token]


def contexts(
    dataset: Dataset, index: LatentIndex, latent: int, tokenizer: tokenizers.Tokenizer
) -> list[ShownContext]:
    """The strongest tokens of a latent, with what is around them."""
    shown = []
    for entry in index.strongest(latent, CONTEXTS):
        values = latents.activations(dataset, entry.sample, latent)
        tokens = dict(zip(values, dataset.tokens(entry.sample).tolist(), strict=True))
        first, last = entry.position - BEFORE, entry.position + AFTER
        positions = [position for position in sorted(values) if first <= position <= last]
        texts = _texts(tokenizer, [tokens[position] for position in positions])
        pieces = [
            Token(text, values[position], position == entry.position)
            for text, position in zip(texts, positions, strict=True)
        ]
        shown.append(ShownContext(entry.value, entry.sample, entry.position, pieces))
    return shown


def page(dataset: Dataset, index: LatentIndex, chosen: Sequence[int], tokenizer_file: Path) -> str:
    """HTML that needs no other file."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    encode = dataset.plan.encode
    title = f"Latents of {encode['site']}"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(dataset.plan.model)}: {encode['latents']:,} latents, of which "
        f"{encode['k']} are stored for each of {dataset.total_rows:,} tokens</p>",
    ]
    for latent in chosen:
        count = index.count(latent)
        share = count / max(dataset.total_rows, 1)
        parts.append(f"<h2>Latent {latent}</h2>")
        parts.append(f"<p class='count'>on {count:,} tokens ({share:.3%})</p><table>")
        shown = contexts(dataset, index, latent, tokenizer)
        largest = max((context.value for context in shown), default=1.0)
        parts += [_row(context, largest) for context in shown]
        parts.append("</table>")
    return "\n".join([*parts, "</body></html>\n"])


def _row(context: ShownContext, largest: float) -> str:
    spans = "".join(_span(token, largest) for token in context.tokens)
    return (
        f"<tr><td class='value'>{context.value:.2f}</td><td>{spans}</td>"
        f"<td class='place'>sample {context.sample}, {context.position}</td></tr>"
    )


def _span(token: Token, largest: float) -> str:
    text = html.escape(token.text.replace("\n", "⏎"))
    if token.value <= 0:
        return f"<span>{text}</span>"
    kind = " class='strongest'" if token.strongest else ""
    strength = min(token.value / largest, 1.0)
    return (
        f"<span{kind} style='background:rgba(240,140,60,{strength:.2f})' "
        f"title='{token.value:.3f}'>{text}</span>"
    )


def _texts(tokenizer: tokenizers.Tokenizer, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text: the bytes of one may be a part of a character."""
    texts, before = [], ""
    for stop in range(1, len(tokens) + 1):
        text = tokenizer.decode(list(tokens[:stop]), skip_special_tokens=False)
        whole = text.removesuffix("\ufffd")
        texts.append(whole[len(before) :])
        before = whole if len(whole) >= len(before) else before
    return texts

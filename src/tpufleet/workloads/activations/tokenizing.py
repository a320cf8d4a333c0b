"""From samples to tokens: the model's own tokenizer and chat template, without transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tpufleet.errors import BadInput, NotFound
from tpufleet.workloads.activations.samples import Sample, TokenizedSample

TOO_LONG = ("skip", "cut", "refuse")
CUT_HERE = "\ue000"  # a private character: no template or text holds it


class ChatTemplateError(BadInput):
    """The chat template cannot show this conversation."""


class Tokenizer:
    """What lies beside a model: tokenizer.json, tokenizer_config.json, chat_template.jinja."""

    def __init__(self, folder: Path):
        path = folder / "tokenizer.json"
        if not path.exists():
            raise NotFound(f"{folder} has no tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise BadInput(f"{path} cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._folder = folder
        self._settings = _read_json(folder / "tokenizer_config.json")
        self._template: Any = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        found = self._tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in found]

    def render(self, messages: Sequence[Mapping[str, str]], answer: str | None = None) -> str:
        """The conversation as the model was trained to read it. With an answer, the text ends
        right after it: what the template adds to close the turn is cut."""
        if answer is not None:
            messages = [*messages, {"role": "assistant", "content": answer + CUT_HERE}]
        try:
            text = self._chat().render(
                messages=messages,
                add_generation_prompt=False,
                **{name: _plain(self._settings.get(name)) for name in ("bos_token", "eos_token")},
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ChatTemplateError(f"the chat template cannot show it: {error}") from error
        if answer is None:
            return text
        kept, mark, _ = text.rpartition(CUT_HERE)
        if not mark:
            raise ChatTemplateError("the chat template does not show the assistant's answer")
        return kept

    def digest(self) -> str:
        digest = hashlib.sha256()
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            path = self._folder / name
            digest.update(path.read_bytes() if path.exists() else b"-")
        return digest.hexdigest()

    def _chat(self) -> Any:
        if self._template is None:
            path = self._folder / "chat_template.jinja"
            text = path.read_text() if path.exists() else self._settings.get("chat_template")
            if isinstance(text, list):  # several by name
                text = {entry["name"]: entry["template"] for entry in text}.get("default")
            if not text:
                raise BadInput(
                    f"{self._folder} has no chat template, but samples are conversations"
                )
            world = ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
            )
            world.globals["raise_exception"] = _refuse
            world.filters["tojson"] = lambda value, **more: json.dumps(value, ensure_ascii=False)
            self._template = world.from_string(text)
        return self._template


def tokenize(
    samples: Sequence[Sample],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    too_long: str,
    vocabulary: int | None = None,
) -> list[TokenizedSample]:
    """Tokens of each sample, in order. What cannot be used has none, and says why. A token beyond
    the model's `vocabulary` is refused: the model would read another one in its place."""
    if too_long not in TOO_LONG:
        raise BadInput(f"too_long is {too_long!r}; choose one of {', '.join(TOO_LONG)}")
    samples = [_written(sample, tokenizer) for sample in samples]
    texts = {s.index: s.text for s in samples if s.text is not None and not s.skip_reason}
    ids: dict[int, Sequence[int]] = {s.index: s.tokens for s in samples if s.tokens is not None}
    for special in (True, False):
        chosen = [s.index for s in samples if s.index in texts and (s.messages is None) is special]
        found = tokenizer.encode_batch(
            [texts[index] for index in chosen], add_special_tokens=special
        )
        ids.update(zip(chosen, found, strict=True))
    return [
        _finish(
            _within(sample, ids.get(sample.index), vocabulary),
            texts.get(sample.index, ""),
            ids.get(sample.index),
            max_length,
            too_long,
        )
        for sample in samples
    ]


def _written(sample: Sample, tokenizer: Tokenizer) -> Sample:
    """The sample with its text: of a conversation, what the model's template makes of it."""
    text = sample.text
    if sample.messages is not None and not sample.skip_reason:
        try:
            text = tokenizer.render(sample.messages, sample.answer)
        except ChatTemplateError as error:
            return replace(sample, fault=str(error))
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        return replace(sample, text=None, fault=f"not Unicode: {error.reason}")
    return replace(sample, text=text)


def _within(sample: Sample, ids: Sequence[int] | None, vocabulary: int | None) -> Sample:
    if sample.skip_reason or not ids:
        return sample
    if sample.tokens is not None and not all(type(token) is int for token in ids):
        return replace(sample, fault="tokens must be whole numbers")
    wrong = [token for token in (min(ids), max(ids)) if not 0 <= token < (vocabulary or 1 << 31)]
    if wrong:
        return replace(sample, fault=f"token {wrong[0]} is not one of the model's {vocabulary}")
    return sample


def _finish(
    sample: Sample, text: str, ids: Sequence[int] | None, max_length: int, too_long: str
) -> TokenizedSample:
    about: dict[str, Any] = {"id": sample.id, **sample.metadata}
    if sample.skip_reason or not ids:
        about["skipped"] = sample.skip_reason or "no tokens"
        return TokenizedSample(index=sample.index, tokens=np.empty(0, np.int32), metadata=about)
    about["preview"] = text[:100]
    about["prompt_sha256"] = hashlib.sha256(
        text.encode() or bytes(str(list(ids)), "ascii")
    ).hexdigest()
    if len(ids) > max_length:
        if too_long == "refuse":
            raise BadInput(
                f"sample {sample.index} ({sample.id}) has {len(ids)} tokens, more than "
                f"{max_length}; raise --max-length, or say --too-long skip or cut"
            )
        about["full_length"] = len(ids)
        if too_long == "skip":
            about["skipped"] = f"{len(ids)} tokens, more than {max_length}"
            ids = ()
        ids = ids[:max_length]
    return TokenizedSample(index=sample.index, tokens=np.asarray(ids, np.int32), metadata=about)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise BadInput(f"{path} cannot be read: {error}") from error


def _plain(token: Any) -> str:
    return token.get("content", "") if isinstance(token, dict) else token or ""


def _refuse(message: str) -> None:
    raise ChatTemplateError(f"the chat template refuses: {message}")

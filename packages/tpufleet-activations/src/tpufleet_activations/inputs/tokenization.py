"""Tokenization with the model's tokenizer and chat template, without the transformers package."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from tpufleet.errors import BadInput, missing, unreadable
from tpufleet_activations.input_errors import check_choice
from tpufleet_activations.inputs import chat_templates, contexts
from tpufleet_activations.inputs.samples import Sample, TokenizedSample

TOO_LONG = ("skip", "cut", "refuse", "split", "concat")
SPECIAL_TOKENS = "special_tokens_map.json"


class Tokenizer:
    """tokenizer.json, tokenizer_config.json and chat templates of a model folder."""

    def __init__(self, folder: Path, chat_date: str = ""):
        """`chat_date` (2026-11-15) is the day for chat templates that state it; else today."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise missing(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise unreadable(path, error) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._folder = folder
        self._settings = _read_json(folder / "tokenizer_config.json")
        self._today = date.fromisoformat(chat_date) if chat_date else date.today()
        self._templates: dict[bool, chat_templates.ChatTemplate] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def encode_offsets(self, text: str) -> list[tuple[int, int]]:
        """Where the tokens of a rendered conversation are in its text."""
        return self._tokenizer.encode(text, add_special_tokens=False).offsets

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Token ids that the tokenizer calls special, such as those of BOS and <|im_start|>."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        return chat_templates.special_tokens(
            self._settings, _read_json(self._folder / SPECIAL_TOKENS)
        )

    @cached_property
    def bos_id(self) -> int:
        """Before each document that is joined to others. Models without BOS, such as GPT-2, were
        trained on documents between EOS."""
        names = self._special_tokens
        for name in ("bos_token", "eos_token"):
            token = self._tokenizer.token_to_id(names.get(name, ""))
            if token is not None:
                return token
        raise BadInput(
            f"{self._folder} names no bos_token or eos_token, which --too-long concat puts before "
            "each document; pass --tokenizer with a folder that does"
        )

    def answer_span(self, sample: Sample, text: str) -> tuple[int, int]:
        """Where the answer of a conversation is in `text`, the conversation as rendered."""
        if sample.messages is None:
            raise BadInput(chat_templates.NO_ANSWER)
        chat = self._chat(sample.tools is not None)
        return chat.answer_span(text, sample.messages, answer=sample.answer, tools=sample.tools)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        answer: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The conversation in the model's chat format. With an answer, the text ends right after
        it, without what the template adds to close the turn."""
        return self._chat(tools is not None).render(messages, answer=answer, tools=tools)

    def chat_date(self) -> str:
        """The day that prompts contain, or "" if they contain none."""
        texts = (self._template_text(with_tools) for with_tools in (False, True))
        return self._today.isoformat() if any(map(chat_templates.uses_date, texts)) else ""

    def digest(self) -> str:
        digest = hashlib.sha256()
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            path = self._folder / name
            digest.update(path.read_bytes() if path.exists() else b"-")
        special = self._folder / SPECIAL_TOKENS
        for path in [*self._additional_templates(), *([special] if special.exists() else [])]:
            digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
        return digest.hexdigest()

    def _additional_templates(self) -> list[Path]:
        return sorted((self._folder / "additional_chat_templates").glob("*.jinja"))

    def _chat(self, with_tools: bool) -> chat_templates.ChatTemplate:
        if with_tools not in self._templates:
            text = self._template_text(with_tools)
            if not text:
                raise BadInput(
                    f"samples are conversations, but {self._folder} has no chat template; "
                    "pass --tokenizer with a folder that has one"
                )
            self._templates[with_tools] = chat_templates.ChatTemplate(
                text, self._special_tokens, self._today
            )
        return self._templates[with_tools]

    def _template_text(self, with_tools: bool) -> str | None:
        default = self._folder / "chat_template.jinja"
        files = {"default": default} if default.exists() else {}
        files |= {path.name.removesuffix(".jinja"): path for path in self._additional_templates()}
        # As in transformers, one file is enough for the configuration to be ignored.
        templates = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
        return chat_templates.select(
            templates or self._settings.get("chat_template"), with_tools=with_tools
        )


def tokenize(
    samples: Sequence[Sample],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    too_long: str,
    vocabulary: int | None = None,
    keep: str = "all",
) -> list[TokenizedSample]:
    """Token ids of each sample, in order. A sample that cannot be used has no tokens and a reason.

    `keep` chooses the tokens that are stored (`contexts.KEEP`); a sample without any is skipped.

    Token ids outside the model's `vocabulary` make a sample unusable: the embedding lookup would
    silently return another row.
    """
    check_choice("too_long", too_long, TOO_LONG)
    check_choice("keep", keep, contexts.KEEP)
    samples = [_with_text(sample, tokenizer) for sample in samples]
    texts = {s.index: s.text for s in samples if s.text is not None and not s.skip_reason}
    ids: dict[int, Sequence[int]] = {s.index: s.tokens for s in samples if s.tokens is not None}
    for special in (True, False):
        chosen = [s.index for s in samples if s.index in texts and (s.messages is None) is special]
        encoded = tokenizer.encode_batch(
            [texts[index] for index in chosen], add_special_tokens=special
        )
        ids.update(zip(chosen, encoded, strict=True))
    finished = [
        _finish(
            _check_vocabulary(sample, ids.get(sample.index), vocabulary),
            texts.get(sample.index, ""),
            ids.get(sample.index),
            max_length,
            too_long,
        )
        for sample in samples
    ]
    if keep != "all":
        finished = [
            _select(sample, done, texts.get(sample.index, ""), tokenizer, keep)
            for sample, done in zip(samples, finished, strict=True)
        ]
    if too_long == "concat":
        return [_with_bos(done, tokenizer.bos_id, keep) for done in finished]
    return finished


def _with_bos(done: TokenizedSample, bos: int, keep: str) -> TokenizedSample:
    """The document with a BOS before it."""
    if not len(done.tokens) or done.tokens[0] == bos:
        return done
    tokens = np.concatenate([np.array([bos], np.int32), done.tokens])
    runs = tuple((start + 1, stop + 1) for start, stop in done.runs)
    return replace(done, tokens=tokens, stored=None if keep == "all" else runs)


def _select(
    sample: Sample, done: TokenizedSample, text: str, tokenizer: Tokenizer, keep: str
) -> TokenizedSample:
    """The sample with the tokens that are stored; skipped if there are none."""
    size = len(done.tokens)
    if not size:
        return done
    mask = np.zeros(size, bool)
    reason = f"no token is left with --keep {keep}"
    if keep == "last":
        mask[-1] = True
    elif keep == "no-special":
        mask = ~np.isin(done.tokens, list(tokenizer.special_ids))
    else:
        try:
            start, stop = tokenizer.answer_span(sample, text)
        except BadInput as error:
            reason = str(error)
        else:
            offsets = tokenizer.encode_offsets(text)[:size]
            mask = np.array([start <= low < stop and low < high for low, high in offsets], bool)
            if full := done.metadata.get("full_length"):
                reason = (
                    f"the answer was cut off: the sample has {full} tokens, more than {size}; "
                    "raise --max-length, or pass --too-long split"
                )
    if not mask.any():
        metadata = {**done.metadata, "skipped": reason}
        return replace(done, tokens=np.empty(0, np.int32), metadata=metadata)
    return replace(done, stored=contexts.runs_of(mask))


def _with_text(sample: Sample, tokenizer: Tokenizer) -> Sample:
    """The sample with its text; a conversation is rendered with the chat template."""
    text = sample.text
    if sample.messages is not None and not sample.skip_reason:
        try:
            text = tokenizer.render(sample.messages, sample.answer, sample.tools)
        except BadInput as error:
            return replace(sample, skip_reason=str(error))
        except Exception as error:  # a template may call anything; other samples are not affected
            reason = chat_templates.CANNOT_RENDER.format(repr(error))
            return replace(sample, skip_reason=reason)
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        return replace(sample, text=None, skip_reason=f"not Unicode: {error.reason}")
    return replace(sample, text=text)


def _check_vocabulary(sample: Sample, ids: Sequence[int] | None, vocabulary: int | None) -> Sample:
    if sample.skip_reason or not ids:
        return sample
    if sample.tokens is not None and not all(type(token) is int for token in ids):
        return replace(sample, skip_reason="tokens must be integers")
    size = vocabulary or 1 << 31
    outside = [token for token in (min(ids), max(ids)) if not 0 <= token < size]
    if outside:
        reason = f"token {outside[0]} is outside the vocabulary of {vocabulary}"
        return replace(sample, skip_reason=reason)
    return sample


def _finish(
    sample: Sample, text: str, ids: Sequence[int] | None, max_length: int, too_long: str
) -> TokenizedSample:
    metadata: dict[str, Any] = {"id": sample.id, **sample.metadata}
    if sample.skip_reason or not ids:
        metadata["skipped"] = sample.skip_reason or "no tokens"
        return TokenizedSample(index=sample.index, tokens=np.empty(0, np.int32), metadata=metadata)
    metadata["preview"] = text[:100]
    metadata["prompt_sha256"] = hashlib.sha256(
        text.encode() or bytes(str(list(ids)), "ascii")
    ).hexdigest()
    if len(ids) > max_length:
        if too_long == "refuse":
            raise BadInput(
                f"sample {sample.index} ({sample.id}) has {len(ids)} tokens, more than "
                f"{max_length}; raise --max-length, or pass --too-long skip, cut or split"
            )
        if too_long not in ("split", "concat"):
            metadata["full_length"] = len(ids)
            if too_long == "skip":
                metadata["skipped"] = f"{len(ids)} tokens, more than {max_length}"
            ids = ids[:max_length] if too_long == "cut" else ()
    return TokenizedSample(index=sample.index, tokens=np.asarray(ids, np.int32), metadata=metadata)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise unreadable(path, error) from error

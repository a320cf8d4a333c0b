"""From samples to tokens: the model's own tokenizer and chat template, without transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from tpufleet.errors import BadInput, NotFound
from tpufleet.workloads.activations.samples import Sample, Tokenized

TOO_LONG = ("skip", "cut", "refuse")
CUT_HERE = "\ue000"  # a private character: no template or text holds it


class Tokenizer:
    """What lies beside a model: tokenizer.json, tokenizer_config.json, chat_template.jinja."""

    def __init__(self, folder: Path):
        path = folder / "tokenizer.json"
        if not path.exists():
            raise NotFound(f"{folder} has no tokenizer.json")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._folder = folder
        self._settings = _read_json(folder / "tokenizer_config.json")
        self._template: Any = None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def encode_all(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
        return [encoding.ids for encoding in found]

    def render(self, messages: Sequence[Mapping[str, str]], answer: str | None = None) -> str:
        """The conversation as the model was trained to read it. With an answer, the text ends
        right after it: what the template adds to close the turn is cut."""
        if answer is not None:
            messages = [*messages, {"role": "assistant", "content": answer + CUT_HERE}]
        text = self._chat().render(
            messages=messages,
            add_generation_prompt=False,
            **{name: _plain(self._settings.get(name)) for name in ("bos_token", "eos_token")},
        )
        if answer is None:
            return text
        kept, mark, _ = text.rpartition(CUT_HERE)
        if not mark:
            raise BadInput("the chat template does not show the assistant's answer")
        return kept

    def digest(self) -> str:
        digest = hashlib.sha256()
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            path = self._folder / name
            digest.update(path.read_bytes() if path.exists() else b"-")
        return digest.hexdigest()

    def _chat(self) -> Any:
        if self._template is None:
            from jinja2.sandbox import ImmutableSandboxedEnvironment

            path = self._folder / "chat_template.jinja"
            text = path.read_text() if path.exists() else self._settings.get("chat_template")
            if isinstance(text, list):  # several by name
                text = {entry["name"]: entry["template"] for entry in text}.get("default")
            if not text:
                raise BadInput(
                    f"{self._folder} has no chat template, but samples are conversations"
                )
            world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            world.globals["raise_exception"] = _refuse
            world.filters["tojson"] = lambda value, **more: json.dumps(value, ensure_ascii=False)
            self._template = world.from_string(text)
        return self._template


def tokenize(
    samples: Sequence[Sample], tokenizer: Tokenizer, *, max_length: int, too_long: str
) -> list[Tokenized]:
    """Tokens of each sample, in order. What cannot be used has none, and says why."""
    if too_long not in TOO_LONG:
        raise BadInput(f"too_long is {too_long!r}; choose one of {', '.join(TOO_LONG)}")
    texts: dict[int, tuple[str, bool]] = {}
    for sample in samples:
        if sample.messages is not None:
            texts[sample.index] = (tokenizer.render(sample.messages, sample.answer), False)
        elif sample.text is not None:
            texts[sample.index] = (sample.text, True)
    ids: dict[int, Sequence[int]] = {s.index: s.tokens for s in samples if s.tokens is not None}
    for special in (True, False):
        chosen = [index for index, (_, wants) in texts.items() if wants is special]
        found = tokenizer.encode_all([texts[index][0] for index in chosen], special=special)
        ids.update(zip(chosen, found, strict=True))
    return [
        _finish(
            sample, texts.get(sample.index, ("",))[0], ids.get(sample.index), max_length, too_long
        )
        for sample in samples
    ]


def _finish(
    sample: Sample, text: str, ids: Sequence[int] | None, max_length: int, too_long: str
) -> Tokenized:
    about: dict[str, Any] = {"id": sample.id, **sample.about}
    if sample.fault or not ids:
        about["skipped"] = sample.fault or "no tokens"
        return Tokenized(index=sample.index, tokens=np.empty(0, np.int32), about=about)
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
    return Tokenized(index=sample.index, tokens=np.asarray(ids, np.int32), about=about)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _plain(token: Any) -> str:
    return token.get("content", "") if isinstance(token, dict) else token or ""


def _refuse(message: str) -> None:
    raise BadInput(f"the chat template refuses: {message}")

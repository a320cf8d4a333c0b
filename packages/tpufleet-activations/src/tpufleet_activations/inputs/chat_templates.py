"""Chat templates of Hugging Face models, rendered exactly as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from functools import partial
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tpufleet.errors import BadInput, unreadable

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Names under which datasets store a message's reasoning; templates read the first.
REASONING = ("reasoning_content", "thinking", "reasoning")
# A private-use character, absent from templates and texts: marks where the answer ends. The space
# shows whether the template trims messages.
ANSWER_END = "\ue000 "
# Private-use characters around an answer, to find where it is in the rendered text.
ANSWER_MARKS = ("\ue001", "\ue002")


CANNOT_RENDER = "the chat template cannot render it: {}"
NO_ANSWER = "it is no conversation that ends with an answer of the assistant"
OMITTED = "the chat template omits or changes the assistant's answer"


class ChatTemplateError(BadInput):
    """The chat template cannot render this conversation."""


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks text of the assistant for training masks; its content is kept."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as in transformers: what it assigns is not visible after it.
        call = self.call_method("_content")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatTemplate:
    """A compiled template. `today` is what `strftime_now` formats."""

    def __init__(self, text: str, special_tokens: Mapping[str, str], today: date):
        self._special_tokens = dict(special_tokens)
        self._today = datetime.combine(today, time())
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, jinja2.ext.loopcontrols],
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._today.strftime
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise unreadable("the chat template", error) from error

    def render(
        self,
        messages: Sequence[Any],
        *,
        answer: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """With an answer, the text ends right after it, without what closes the turn."""
        if answer is not None:
            messages = [*messages, {"role": "assistant", "content": answer + ANSWER_END}]
        try:
            text = self._template.render(
                messages=[_with_reasoning(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=False,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ChatTemplateError(CANNOT_RENDER.format(error)) from error
        if answer is None:
            return text
        before, marker, after = text.rpartition(ANSWER_END[0])
        if not marker:
            raise ChatTemplateError(OMITTED)
        return before if after.startswith(ANSWER_END[1]) else before.rstrip()

    def answer_span(
        self,
        text: str,
        messages: Sequence[Any],
        *,
        answer: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[int, int]:
        """Where the answer, or the content of the last message of the assistant, is in `text`, the
        conversation as rendered."""
        content = answer
        if content is None:
            last = messages[-1] if messages else {}
            content = last.get("content") if isinstance(last, Mapping) else None
            if not isinstance(content, str) or last.get("role") != "assistant":
                raise ChatTemplateError(NO_ANSWER)
            messages = messages[:-1]
        before, after = ANSWER_MARKS
        marked = {"role": "assistant", "content": before + content + after}
        around = self.render([*messages, marked], tools=tools)
        start, stop = around.find(before), around.find(after)
        if start < 0 or stop < 0:
            raise ChatTemplateError(OMITTED)
        # What follows has the same length in both, whatever was trimmed from the answer.
        closing = len(around) - stop - len(after) if answer is None else 0
        return start, len(text) - closing


def select(templates: Any, *, with_tools: bool) -> str | None:
    """The text of a template, which may be one of several by name."""
    if isinstance(templates, list):
        templates = {entry["name"]: entry["template"] for entry in templates}
    if isinstance(templates, dict):
        if with_tools and "tool_use" in templates:
            return templates["tool_use"]
        return templates.get("default")
    return templates


def special_tokens(*settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a tokenizer has, from its configuration files; the first wins."""
    found: dict[str, str] = {}
    for source in settings:
        extra = source.get("extra_special_tokens")
        names = {name: source.get(name) for name in SPECIAL_TOKENS}
        for name, token in {**names, **(extra if isinstance(extra, dict) else {})}.items():
            content = token.get("content") if isinstance(token, dict) else token
            if content and name not in found:
                found[name] = content
    return found


def uses_date(text: str | None) -> bool:
    """Whether prompts depend on the day on which they are rendered."""
    return "strftime_now" in (text or "")


def _with_reasoning(message: Any) -> Any:
    if not isinstance(message, Mapping):
        raise TypeError(f"messages must be objects, not {message!r}")
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _raise_exception(message: str) -> None:
    """Chat templates call this to reject a conversation."""
    raise ChatTemplateError(CANNOT_RENDER.format(message))

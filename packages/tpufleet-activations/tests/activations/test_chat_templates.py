"""Chat templates render exactly as transformers renders them."""

from __future__ import annotations

import hashlib
import json
from datetime import date

import pytest

from tests.activations.tiny_model import write_tokenizer
from tpufleet.errors import BadInput
from tpufleet_activations.inputs import chat_templates, sources, tokenization

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TODAY = date.today()
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Über <weather> & 'wind'",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CHAT = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": "  What is 2 + 2? ü "},
    {"role": "assistant", "content": "4", "reasoning": "two and two"},
    {"role": "user", "content": "And 3 + 3?"},
]
# Each uses one feature of the templates that models are published with.
TEMPLATES = {
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{% set x = 'seen' %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{{ x }}\n{% endfor %}",
    "tools is not none": "{% if tools is not none %}T{{ tools | length }}{% else %}none{% endif %}",
    "tools is defined": "{% if tools is defined and tools %}{{ tools | tojson }}{% endif %}end",
    "tojson(indent)": "{% for t in tools or [] %}{{ t | tojson(indent=4) }}\n{% endfor %}",
    "tojson options": "{{ messages | tojson(sort_keys=true, separators=(',', ':')) }}"
    "{{ messages | tojson(ensure_ascii=true) }}",
    "strftime_now": "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}",
    "special tokens": "{{ bos_token }}{{ pad_token }}{{ eos_token }}"
    "{{ unk_token is defined }}{{ bos_token + 'x' }}",
    "documents": "{{ documents is none }}{{ documents is defined }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{{ m['role'] }}{% endfor %}",
    "white space": "{% for m in messages %}\n    {% if true %}\n  {{ m.content | trim }}\n"
    "    {% endif %}\n{%- endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}{% endfor %}",
    "generation prompt": "{{ add_generation_prompt }}{{ messages[-1].content }}",
    "html": "{{ messages[0].content }}{{ messages[0] | tojson }}",
}


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name, tools):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    days = [date.today()]
    theirs, _ = utils.render_jinja_template([CHAT], tools, chat_template=TEMPLATES[name], **TOKENS)
    days.append(date.today())  # midnight may be between
    ours = {
        chat_templates.ChatTemplate(TEMPLATES[name], TOKENS, day).render(CHAT, tools=tools)
        for day in days
    }
    assert theirs[0] in ours


@pytest.mark.parametrize("answer", ["The sum", "The sum ", "\n```grid\n"])
@pytest.mark.parametrize("content", ["m.content", "m.content | trim"])
def test_an_answer_is_continued_as_in_transformers(content, answer):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = "{% for m in messages %}<{{ m.role }}>{{ " + content + " }}</>\n{% endfor %}"
    chat = [*CHAT, {"role": "assistant", "content": answer}]
    theirs, _ = utils.render_jinja_template(
        [chat], chat_template=template, continue_final_message=True
    )
    assert chat_templates.ChatTemplate(template, {}, TODAY).render(CHAT, answer=answer) == theirs[0]


@pytest.mark.slow
def test_the_whole_tokenizer_renders_as_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>", "__type": "AddedToken", "lstrip": False, "rstrip": False,
                      "normalized": False, "single_word": False, "special": True},
        "eos_token": None,
        "pad_token": "<pad>",
        "chat_template": [
            {"name": "default", "template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}plain"},
            {"name": "tool_use", "template": "{{ tools[0] | tojson(indent=2) }}"},
        ],
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = tokenization.Tokenizer(tmp_path)
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(CHAT, tools=tools, tokenize=False)
        assert ours.render(CHAT, tools=tools) == expected


# Files of a folder, and the template of its tokenizer_config.json.
SEVERAL_TEMPLATES = {
    "default and tools": (("chat_template", "tool_use"), None),
    "default and others": (("chat_template", "rag"), None),
    "one file": (("chat_template",), None),
    "before the config": (("chat_template", "tool_use"), "config"),
    "before a list": (
        ("chat_template",),
        [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "list tools"}],
    ),
    "a list": ((), [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]),
    "a list without tools": ((), [{"name": "default", "template": "a"}]),
    "default twice": (("chat_template", "default"), None),
    "no default": (("tool_use",), "config"),
}


def write_templates(folder, files, config=None):
    write_tokenizer(folder)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {"chat_template": config} if config else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "additional_chat_templates").mkdir()
    for name in files:
        parent = folder if name == "chat_template" else folder / "additional_chat_templates"
        text = f"ü {name} {{{{ tools | length if tools else 0 }}}}"
        (parent / f"{name}.jinja").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("tools", [None, TOOLS, []], ids=["plain", "tools", "no tools"])
@pytest.mark.parametrize("name", SEVERAL_TEMPLATES)
def test_one_of_several_templates_is_chosen_as_in_transformers(tmp_path, name, tools):
    transformers = pytest.importorskip("transformers")
    write_templates(tmp_path, *SEVERAL_TEMPLATES[name])
    theirs, ours = (
        transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path),
        tokenization.Tokenizer(tmp_path),
    )
    try:
        expected = theirs.apply_chat_template(CHAT, tools=tools, tokenize=False)
    except ValueError:
        with pytest.raises(BadInput, match="no chat template"):
            ours.render(CHAT, tools=tools)
    else:
        assert ours.render(CHAT, tools=tools) == expected


def test_additional_templates_are_part_of_the_digest(tmp_path):
    write_templates(tmp_path, ["chat_template"])
    digest = tokenization.Tokenizer(tmp_path).digest()
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    content = b"".join((tmp_path / name).read_bytes() for name in names)
    assert digest == hashlib.sha256(content).hexdigest(), "plans without such files stay valid"
    digests = {digest}
    for name, text in (("a", "x"), ("a", "y"), ("b", "x")):
        path = tmp_path / "additional_chat_templates" / f"{name}.jinja"
        path.write_text(text)
        digests.add(tokenization.Tokenizer(tmp_path).digest())
        path.unlink()
    assert len(digests) == 4


def test_tools_of_a_sample_reach_the_template(tmp_path):
    write_tokenizer(tmp_path)
    template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"messages": CHAT, "tools": TOOLS}))
    source = sources.open_source({"kind": "jsonl", "path": str(data)})
    samples = tokenization.tokenize(
        source.read(range(1)), tokenization.Tokenizer(tmp_path), max_length=99, too_long="skip"
    )
    assert samples[0].metadata["preview"] == "weather"


def test_prompts_keep_the_date_of_their_plan(tmp_path):
    """Otherwise two workers, or a run that goes over midnight, would store different prompts."""
    write_tokenizer(tmp_path)
    template = "{{ strftime_now('%Y-%m-%d') }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert tokenization.Tokenizer(tmp_path, "2024-07-26").render(CHAT) == "2024-07-26"
    assert tokenization.Tokenizer(tmp_path, "2024-07-26").chat_date() == "2024-07-26"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    assert tokenization.Tokenizer(tmp_path).chat_date() == ""


def test_a_template_that_cannot_be_read_is_reported():
    with pytest.raises(BadInput, match="cannot read the chat template"):
        chat_templates.ChatTemplate("{% for %}", {}, TODAY)

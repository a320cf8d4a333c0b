"""Which tokens are stored, and long samples in several contexts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.activations.test_decoder import run as forward_pass
from tests.activations.tiny_model import tpu
from tests.examples import examples
from tpufleet_activations.inputs import contexts, tokenization
from tpufleet_activations.inputs.chat_templates import NO_ANSWER
from tpufleet_activations.inputs.samples import Sample, TokenizedSample
from tpufleet_activations.io import datasets, verification
from tpufleet_activations.io.addresses import open_storage

USER = {"role": "user", "content": "what is 1 1"}
ANSWER = {"role": "assistant", "content": "it is 2"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Characters, with a BOS before texts, and the markers of the template as special tokens."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    letters = {letter: n for n, letter in enumerate("?abcdefghijklmnopqrstuvwxyz 0123456789\n")}
    made = Tokenizer(models.WordLevel(letters, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    markers = ("<s>", "<|user|>", "<|assistant|>", "<|end|>")
    made.add_special_tokens([AddedToken(name, special=True) for name in markers])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    template = (
        "{{ '<s>' }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}<|end|>\n"
        "{% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "bos_token": "<s>"})
    )
    return tokenization.Tokenizer(folder)


def stored_text(tokenizer, sample: Sample, keep: str) -> str:
    [done] = tokenization.tokenize([sample], tokenizer, max_length=200, too_long="skip", keep=keep)
    if not len(done.tokens):
        return f"skipped: {done.metadata['skipped']}"
    chosen = [token for start, stop in done.runs for token in done.tokens[start:stop].tolist()]
    decode = tokenizer._tokenizer.id_to_token
    return "".join(decode(token) for token in chosen)


CHAT = Sample(index=0, id="c", messages=[USER, ANSWER])
TRIMMED = Sample(index=0, id="c", messages=[USER, {**ANSWER, "content": "  it is 2 "}])
STARTED = Sample(index=0, id="c", messages=[USER], answer="it is")
QUESTION = Sample(index=0, id="q", messages=[USER])
TEXT = Sample(index=0, id="t", text="hello")
EMPTY = Sample(index=0, id="b", text="")  # it has a BOS
KEPT = [
    (TEXT, "all", "<s>hello"),
    (TEXT, "no-special", "hello"),
    (TEXT, "last", "o"),
    (TEXT, "answer", f"skipped: {NO_ANSWER}"),
    (CHAT, "no-special", "\nwhat is 1 1\n\nit is 2\n"),
    (CHAT, "answer", "it is 2"),
    (TRIMMED, "answer", "it is 2"),
    (STARTED, "answer", "it is"),
    (QUESTION, "answer", f"skipped: {NO_ANSWER}"),
    (EMPTY, "no-special", "skipped: no token is left with --keep no-special"),
]  # fmt: skip


def test_a_sample_whose_answer_was_cut_off_says_so(tokenizer):
    [done] = tokenization.tokenize([CHAT], tokenizer, max_length=9, too_long="cut", keep="answer")
    assert not len(done.tokens)
    full = done.metadata["full_length"]
    assert f"cut off: the sample has {full} " in done.metadata["skipped"]


@pytest.mark.parametrize("sample, keep, text", KEPT)
def test_tokens_are_kept_as_asked(tokenizer, sample, keep, text):
    assert stored_text(tokenizer, sample, keep) == text


@settings(max_examples=examples(200), deadline=None)
@given(
    size=st.integers(0, 60),
    longest=st.integers(1, 20),
    stride=st.integers(1, 20),
    kept=st.sets(st.integers(0, 59)),
)
def test_each_kept_token_is_stored_once_and_sees_as_much_as_possible(size, longest, stride, kept):
    stride = min(stride, longest)
    mask = np.array([n in kept for n in range(size)], bool)
    sample = TokenizedSample(
        index=0, tokens=np.arange(size), metadata={}, stored=contexts.runs_of(mask)
    )
    parts = contexts.split(sample, longest, stride)
    positions = [p for part in parts for p in part.stored_positions.tolist()]
    assert positions == np.flatnonzero(mask).tolist()
    for part in parts:
        assert part.stop - part.start <= longest
        for position in part.stored_positions.tolist():
            assert position - part.start >= min(position, longest - stride)
    if len(parts) > 1:
        assert [part.metadata["context"] for part in parts] == list(range(parts[0].count))


@pytest.mark.slow
def test_a_long_document_is_stored_once_from_overlapping_contexts(tmp_path, model_folder):
    lengths = [20, 70, 33, 5]
    lines = [
        json.dumps({"tokens": [(7 * n + i * i) % 61 for i in range(size)]})
        for n, size in enumerate(lengths)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out"
    code, printed = tpu(
        "plan", out, "--model", model_folder, "--data", tmp_path / "data.jsonl", "--site",
        "resid_post.1", "--dtype", "f32", "--compute", "f32", "--max-length", 32, "--too-long",
        "split", "--stride", 16,
    )  # fmt: skip
    assert code == 0, printed
    assert tpu("run", out, "--quiet", "--mesh", "data=8")[0] == 0
    assert tpu("verify", out)[0] == 0
    dataset = datasets.open_dataset(str(out))
    for sample, size in enumerate(lengths):
        assert dataset.positions(sample).tolist() == list(range(size))
        assert dataset.tokens(sample).tolist() == json.loads(lines[sample])["tokens"]
        assert dataset.metadata(sample)["tokens"] == size
    whole = json.loads(lines[1])["tokens"]
    for start, first in ((0, 0), (16, 32), (32, 48), (48, 64)):
        window = np.array(whole[start : start + 32], np.int32)
        alone = forward_pass(model_folder, ["resid_post.1"], window[None])["resid_post.1"][0]
        stored = dataset.read(1, "resid_post.1")[first : start + 32]
        np.testing.assert_allclose(stored, alone[first - start :], rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_only_kept_tokens_are_stored_at_their_positions(tmp_path, model_folder):
    conversation = {"messages": [USER, ANSWER]}
    lines = [json.dumps(conversation), json.dumps({"text": "no answer"})]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out"
    common = (
        "plan", out, "--model", model_folder, "--data", tmp_path / "data.jsonl", "--site",
        "resid_post.1", "--dtype", "f32", "--compute", "f32",
    )  # fmt: skip
    code, printed = tpu(*common, "--keep", "answer", "--exact")
    assert code == 0 and "1 skipped, mostly (1): it is no conversation" in printed, printed
    assert tpu("run", out, "--quiet", "--mesh", "data=8")[0] == 0
    assert verification.verify(open_storage(out)).intact
    dataset = datasets.open_dataset(str(out))
    text = tokenization.Tokenizer(model_folder).render([USER, ANSWER])
    at = text.index("it is 2")
    assert dataset.positions(0).tolist() == list(range(at, at + 7))
    ids = np.array(tokenization.Tokenizer(model_folder).encode(text), np.int32)
    alone = forward_pass(model_folder, ["resid_post.1"], ids[None])["resid_post.1"][0]
    np.testing.assert_allclose(
        dataset.read(0, "resid_post.1"), alone[at : at + 7], rtol=2e-4, atol=2e-5
    )
    assert len(dataset.tokens(1)) == 0
    code, printed = tpu(*common)
    assert code == 1 and 'keep is "answer", requested' in printed, printed


def test_a_stride_is_refused_where_it_has_no_effect(tmp_path, model_folder):
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "abc"}))
    common = ("plan", tmp_path / "o", "--model", model_folder, "--data", tmp_path / "data.jsonl")
    code, printed = tpu(*common, "--stride", 8)
    assert code == 2 and "--too-long split" in printed
    code, printed = tpu(*common, "--too-long", "split", "--max-length", 16, "--stride", 17)
    assert code == 2 and "between 1 and --max-length 16" in printed


def tokenized(index: int, size: int, stored=None) -> TokenizedSample:
    tokens = np.array([0, *range(100 * index + 1, 100 * index + size)], np.int32)
    return TokenizedSample(index=index, tokens=tokens, metadata={}, stored=stored)


def test_joined_contexts_are_full_and_begin_with_bos():
    samples = [tokenized(1, 5), tokenized(2, 9), tokenized(3, 2)]
    joined = contexts.join(samples, 6)
    assert [context.tokens.tolist() for context in joined] == [
        [0, 101, 102, 103, 104, 0],
        [0, 201, 202, 203, 204, 205],
        [0, 206, 207, 208, 0, 301],
    ]
    # The first token of the second and third context is there for the model alone.
    assert [context.runs for context in joined] == [
        ((0, 5), (5, 6)),
        ((1, 6),),
        ((1, 4), (4, 6)),
    ]
    assert [part.metadata for part in joined[2].stored] == [{"context": 2, "contexts": 3}, {}]


@given(
    sizes=st.lists(st.integers(0, 40), max_size=12),
    length=st.integers(1, 17),
    last=st.booleans(),
)
@settings(max_examples=examples(200))
def test_joined_contexts_store_each_chosen_token_once(sizes, length, last):
    samples = [
        tokenized(n, size, ((size - 1, size),) if last and size else None) if size
        else TokenizedSample(index=n, tokens=np.empty(0, np.int32), metadata={})
        for n, size in enumerate(sizes)
    ]  # fmt: skip
    joined = contexts.join(samples, length)
    full = [context for context in joined if len(context.tokens)]
    assert all(len(context.tokens) == length for context in full[:-1]) or last
    assert length == 1 or all(context.tokens[0] == 0 for context in full)
    stored = [
        (part.sample.index, position)
        for context in full
        for part in context.stored
        for position in part.stored_positions.tolist()
    ]
    assert stored == [
        (sample.index, position)
        for sample in samples
        for start, stop in sample.runs
        for position in range(start, stop)
    ]
    for context in full:
        tokens = [t for start, stop in context.runs for t in context.tokens[start:stop].tolist()]
        assert tokens == [
            token
            for part in context.stored
            for token in part.sample.tokens[part.stored_positions].tolist()
        ]


def test_documents_get_a_bos_unless_they_have_one(tokenizer):
    texts = [Sample(index=0, id="a", text="ab"), Sample(index=1, id="b", tokens=[1, 2])]
    done = tokenization.tokenize(texts, tokenizer, max_length=4, too_long="concat")
    bos = tokenizer.bos_id
    assert [one.tokens.tolist() for one in done] == [[bos, 1, 2], [bos, 1, 2]]
    done = tokenization.tokenize(
        texts, tokenizer, max_length=4, too_long="concat", keep="no-special"
    )
    assert [one.runs for one in done] == [((1, 3),), ((1, 3),)]

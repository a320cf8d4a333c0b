"""The same number is the same sample, from every kind of input and for every way of asking."""

from __future__ import annotations

import json
import shutil
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workloads.tiny import task
from tpufleet.errors import BadInput, NotFound
from tpufleet.workloads.activations import batches, inputs, tokenizing
from tpufleet.workloads.activations.arc import grids, prompts, tasks
from tpufleet.workloads.activations.samples import Sample


@pytest.fixture
def tokenizer(model_folder):
    return tokenizing.Tokenizer(model_folder)


def texts(source):
    return [sample.text for sample in source.read(range(source.count()))]


def make_jsonl(path, count):
    lines = [json.dumps({"id": f"s{n}", "text": f"text {n}"}) for n in range(count)]
    path.write_text("\n\n".join(lines) + "\n")
    return {"kind": "jsonl", "path": str(path)}


def make_parquet(path, count):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": [f"text {n}" for n in range(count)]})
    pyarrow.parquet.write_table(table, path, row_group_size=7)
    return {"kind": "parquet", "path": str(path)}


def make_dataset(path, count):
    """What `datasets.save_to_disk` writes: a split with two Arrow stream files."""
    import pyarrow

    folder = path / "train"
    folder.mkdir(parents=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, span in zip(names, (range(count // 3), range(count // 3, count)), strict=True):
        table = pyarrow.table({"text": [f"text {n}" for n in span]})
        with pyarrow.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(state))
    (path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    return {"kind": "hf", "path": str(path)}


def make_text(path, count):
    path.write_text("\n".join(f"text {n}" for n in range(count)))
    return {"kind": "text", "path": str(path)}


MAKERS = [make_jsonl, make_parquet, make_dataset, make_text]


@pytest.mark.parametrize("make", MAKERS, ids=["jsonl", "parquet", "hf", "text"])
def test_every_kind_gives_its_samples_by_number(tmp_path, make):
    data = make(tmp_path / "data", 600)
    source = inputs.open_source(data)
    assert source.count() == 600
    everything = texts(source)
    assert everything == [f"text {n}" for n in range(600)]
    for start, stop in [(0, 1), (255, 257), (511, 600), (13, 13)]:
        found = source.read(range(start, stop))
        assert [sample.text for sample in found] == everything[start:stop]
        assert [sample.index for sample in found] == list(range(start, stop))
    assert inputs.open_source({**data, "max_samples": 5}).count() == 5
    assert inputs.open_source(data).digest() == source.digest()
    assert inputs.open_source({**data, "max_samples": 5}).digest() != source.digest()


def test_several_files_are_one_source_in_the_order_of_their_names(tmp_path):
    for name, span in {"b": range(300, 400), "a": range(300)}.items():
        lines = (json.dumps({"text": f"text {n}"}) for n in span)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    for path in (tmp_path, tmp_path / "*.jsonl"):
        source = inputs.open_source({"kind": "jsonl", "path": str(path)})
        assert texts(source) == [f"text {n}" for n in range(400)]
        assert [sample.text for sample in source.read(range(298, 302))] == [
            f"text {n}" for n in range(298, 302)
        ]


def test_changed_content_changes_the_digest(tmp_path):
    data = make_jsonl(tmp_path / "a.jsonl", 10)
    before = inputs.open_source(data).digest()
    path = tmp_path / "a.jsonl"
    path.write_text(path.read_text().replace("text 7", "text 8"))
    assert inputs.open_source(data).digest() != before


@pytest.mark.parametrize(
    "name, kind", [("a.jsonl", "jsonl"), ("a.parquet", "parquet"), ("a.txt", "text")]
)
def test_the_kind_is_guessed_from_the_name(name, kind):
    assert inputs.guess_kind(name) == kind


def test_what_cannot_be_opened_is_refused_in_words(tmp_path):
    with pytest.raises(BadInput, match="kind"):
        inputs.open_source({"kind": "csv", "path": "x"})
    with pytest.raises(NotFound):
        inputs.open_source({"kind": "jsonl", "path": str(tmp_path / "none.jsonl")})
    with pytest.raises(BadInput, match="--kind"):
        inputs.guess_kind("something")


# -- tokens -------------------------------------------------------------------------------------


def test_an_unusable_sample_keeps_its_number_and_says_why(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\nnot json\n{"other": 1}\n{"text": ""}\n[1]\n')
    source = inputs.open_source({"kind": "jsonl", "path": str(path)})
    found = tokenizing.tokenize(source.read(range(5)), tokenizer, max_length=50, too_long="skip")
    assert [len(sample.tokens) for sample in found] == [4, 0, 0, 0, 0]
    reasons = [sample.about.get("skipped", "") for sample in found]
    assert "JSON" in reasons[1] and "other" in reasons[2] and reasons[3] == "no tokens"


@pytest.mark.parametrize(
    "sample, reason",
    [
        ({"text": "lone \ud800 half"}, "not Unicode"),
        ({"tokens": [1, "two"]}, "whole numbers"),
        ({"tokens": [1, True]}, "whole numbers"),
        ({"tokens": [1, 61]}, "token 61 is not one of the model's 61"),
        ({"tokens": [-1, 3]}, "token -1 is not"),
        ({"messages": [{"role": "jester", "content": "hi"}]}, "no jesters"),
        ({"messages": [3]}, "template"),
        ({"messages": [{"role": "user", "content": {"no": "text"}}]}, "template"),
    ],
)
def test_one_sample_that_no_model_can_read_does_not_stop_the_others(
    model_folder, tmp_path, sample, reason
):
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    template = (
        "{% for message in messages %}"
        "{% if message.role == 'jester' %}{{ raise_exception('no jesters') }}{% endif %}"
        "{{ message.role + message.content }}{% endfor %}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    both = [Sample(index=0, id="a", **sample), Sample(index=1, id="b", text="fine")]
    words = tokenizing.Tokenizer(tmp_path)
    found = tokenizing.tokenize(both, words, max_length=50, too_long="skip", vocabulary=61)
    assert [len(one.tokens) for one in found] == [0, 4]
    assert reason in found[0].about["skipped"]


@pytest.mark.parametrize("split", [None, "file"])
def test_text_that_is_not_utf_8_is_skipped_with_the_reason(tmp_path, split):
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9 in latin-1\nplain\n")
    source = inputs.open_source({"kind": "text", "path": str(path), "split": split})
    first, *rest = source.read(range(source.count()))
    assert "not UTF-8" in first.fault
    assert [sample.text for sample in rest] == (["plain"] if split is None else [])


def test_a_long_sample_is_skipped_cut_or_refused_never_in_silence(tokenizer):
    sample = Sample(index=3, id="x", text="a" * 20)
    skip, cut = (
        tokenizing.tokenize([sample], tokenizer, max_length=8, too_long=how)[0]
        for how in ("skip", "cut")
    )
    assert (len(skip.tokens), skip.about["full_length"]) == (0, 20)
    assert (len(cut.tokens), cut.about["full_length"]) == (8, 20)
    with pytest.raises(BadInput, match="20 tokens"):
        tokenizing.tokenize([sample], tokenizer, max_length=8, too_long="refuse")


def test_tokens_given_as_they_are_are_used_as_they_are(tokenizer):
    sample = Sample(index=0, id="x", tokens=[5, 6, 7])
    found = tokenizing.tokenize([sample], tokenizer, max_length=8, too_long="skip")[0]
    assert found.tokens.tolist() == [5, 6, 7]


def test_a_conversation_ends_where_its_answer_ends(tokenizer):
    text = tokenizer.render([{"role": "user", "content": "hi"}], "### Output\n\n```grid")
    assert text == "<|user|>\nhi<|end|>\n<|assistant|>\n### Output\n\n```grid"
    assert tokenizer.render([{"role": "user", "content": "hi"}]).endswith("hi<|end|>\n")


def test_tokens_equal_those_of_transformers(model_folder, tokenizer):
    transformers = pytest.importorskip("transformers")
    other = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(model_folder / "tokenizer.json")
    )
    text = "The quick brown fox, 12:34."
    assert tokenizer.encode(text) == other(text)["input_ids"]


# -- batches ------------------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(0, 40), max_size=40)


@settings(max_examples=80, deadline=None)
@given(
    lengths=LENGTHS,
    batching=st.sampled_from(["bucket", "pack"]),
    batch_tokens=st.integers(1, 200),
    multiple=st.sampled_from([1, 2, 8]),
)
def test_each_sample_lies_once_in_a_batch_and_the_label_equals_the_content(
    lengths, batching, batch_tokens, multiple
):
    tokens = [np.full(size, n + 1, np.int32) for n, size in enumerate(lengths)]
    made = list(
        batches.cut(
            tokens,
            batching=batching,
            buckets=(8, 16, 40),
            batch_tokens=batch_tokens,
            multiple=multiple,
        )
    )
    placed = [place for batch in made for place in batch.places]
    assert sorted(place.sample for place in placed) == [n for n, size in enumerate(lengths) if size]
    for batch in made:
        assert batch.tokens.shape[0] % multiple == 0
        assert batch.tokens.shape == batch.positions.shape
        for place in batch.places:
            span = slice(place.start, place.start + place.length)
            np.testing.assert_array_equal(batch.tokens[place.row, span], tokens[place.sample])
            assert batch.positions[place.row, span].tolist() == list(range(place.length))
    assert sum(batch.real_tokens for batch in made) == sum(lengths)


def test_the_order_of_samples_is_the_same_for_any_number_of_devices():
    chance = Random(0)
    tokens = [np.ones(chance.randint(1, 40), np.int32) for _ in range(50)]
    orders = {
        tuple(
            place.sample
            for batch in batches.cut(
                tokens, batching="bucket", buckets=(16, 40), batch_tokens=size, multiple=many
            )
            for place in batch.places
        )
        for size, many in [(40, 1), (160, 4), (500, 8)]
    }
    assert len(orders) == 1


def test_bucketing_pads_far_less_than_padding_to_the_maximum():
    chance = np.random.default_rng(0)
    lengths = np.clip(chance.lognormal(6, 0.6, 2_000), 1, 2048).astype(int)
    made = batches.cut(
        [np.ones(size, np.int32) for size in lengths],
        batching="bucket",
        buckets=batches.buckets_up_to(2048),
        batch_tokens=16384,
    )
    computed = sum(batch.tokens.size for batch in made)
    assert computed < 1.25 * lengths.sum()
    assert computed < 0.35 * 2048 * len(lengths)


@pytest.mark.parametrize("length, largest", [(2048, 2048), (100, 100), (5000, 5000)])
def test_buckets_end_at_the_longest_length(length, largest):
    table = batches.buckets_up_to(length)
    assert table[-1] == largest and list(table) == sorted(set(table))


# -- ARC ----------------------------------------------------------------------------------------


def write_tasks(path, count, tests=1):
    path.write_text("\n".join(json.dumps(task(n, tests)) for n in range(count)))
    return {"kind": "arc", "path": str(path)}


def test_a_task_gives_eight_augmentations_of_each_test(tmp_path):
    source = inputs.open_source(write_tasks(tmp_path / "t.jsonl", 5, tests=2))
    assert source.count() == 5 * 8 * 2
    found = source.read(range(source.count()))
    assert len({sample.id for sample in found}) == 80
    turns = [
        (sample.about["augmentation"]["hflip"], sample.about["augmentation"]["n_rot90"])
        for sample in found[:16:2]
    ]
    assert sorted(turns) == sorted(tasks.DIHEDRAL)
    more = inputs.open_source({**write_tasks(tmp_path / "t.jsonl", 5), "predictions_per_task": 12})
    assert more.count() == 5 * 12  # twelve asked for, twelve made


def test_a_prompt_is_the_same_whoever_makes_it_and_differs_with_the_seed(tmp_path):
    data = write_tasks(tmp_path / "t.jsonl", 6, tests=2)
    whole = inputs.open_source(data).read(range(96))
    pieces = [
        sample
        for start in range(0, 96, 7)
        for sample in inputs.open_source(data).read(range(start, min(start + 7, 96)))
    ]
    assert whole == pieces
    assert inputs.open_source(data, seed=43).read(range(96)) != whole


def test_an_augmented_grid_can_be_changed_back():
    chance = Random(5)
    for number in range(40):
        one = task(number)
        change = tasks.augmentation(one, number, chance)
        grid = one["train"][0]["input"]
        assert tasks.restore_grid(tasks.change_grid(grid, change), change) == grid


def test_about_one_augmentation_in_ten_changes_the_background():
    chance = Random(1)
    changed = sum(tasks.augmentation(task(0), n, chance).colors[0] != 0 for n in range(3_000))
    assert 200 < changed < 340  # a shuffle leaves it in place one time in ten


def test_a_broken_task_keeps_its_number(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join([json.dumps(task(0)), "{", '{"train": []}', json.dumps(task(3))]))
    found = inputs.open_source({"kind": "arc", "path": str(path)}).read(range(32))
    assert [bool(sample.fault) for sample in found] == [False] * 8 + [True] * 16 + [False] * 8
    assert found[24].id.startswith("task_00000003")


GRID = [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "name, text",
    [
        ("MinimalGridEncoder()", "012\n345"),
        ("GridWithSeparationEncoder('|')", "0|1|2\n3|4|5"),
        ("GridCodeBlockEncoder(MinimalGridEncoder())", "```grid\n012\n345\n```"),
        ("GridShapeEncoder(MinimalGridEncoder())", "```grid shape: 2x3\n012\n345\n```"),
        ("RowNumberEncoder(MinimalGridEncoder())", "1 012\n2 345"),
        ("RepeatNumberEncoder(2)", "001122\n334455"),
        ("RepeatNumberEncoder(n=1)", "012\n345"),
        ("ReplaceNumberEncoder(MinimalGridEncoder())", "ñò÷\nûąć"),
        (grids.DEFAULT, "```grid shape: 2x3\n1 012\n2 345\n```"),
    ],
)
def test_grids_are_written_as_the_encoder_says(name, text):
    assert grids.encoder(name)(GRID) == text


@pytest.mark.parametrize(
    "name",
    ["__import__('os').system('true')", "Minimal()", "MinimalGridEncoder(", "open('x')", "1+1"],
)
def test_an_encoder_that_is_no_encoder_is_refused_and_never_run(name):
    with pytest.raises(BadInput):
        grids.encoder(name)(GRID)


def test_the_default_prompt_shows_the_examples_then_the_test_case():
    one = {"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[3]]}]}
    prompt = prompts.prompts(one, grids.encoder("MinimalGridEncoder()"), prompts.DEFAULT)[0]
    assert prompt.system.startswith("You solve puzzles from the Abstraction and Reasoning Corpus")
    assert prompt.user == (
        "Here is a puzzle from the Abstraction and Reasoning Corpus (ARC).\n"
        "The pairs of grids below show what becomes of an input grid.\n"
        "\n## Example 1\n\n### Input\n\n1\n\n### Output\n\n2\n"
        "\n## Test case\n\n### Input\n\n3"
    )
    assert prompt.answer == "### Output\n\n```grid"


@pytest.mark.parametrize("version", sorted(prompts.VERSIONS))
def test_every_prompt_version_shows_what_it_needs(version):
    one = {**task(1), "code": "def task(grid): ...", "test_output_choices": [[[7]], [[8]]]}
    encode = grids.encoder("MinimalGridEncoder()")
    prompt = prompts.prompts(one, encode, version)[0]
    shown = {"input-from-inputs-v0": "input", "output-from-outputs-v0": "output"}
    if version != "output-from-code-v0":
        assert encode(one["train"][0][shown.get(version, "input")]) in prompt.user
    for part in prompts.VERSIONS[version].needs:
        assert {"code": "def task", "output": "### Output"}.get(part, "option 2") in prompt.user


def test_a_prompt_version_without_what_it_needs_is_refused():
    with pytest.raises(BadInput, match="code"):
        prompts.prompts(task(1), grids.encoder("MinimalGridEncoder()"), "output-from-code-v0")


def test_pairs_become_tasks_by_the_rules_of_the_converter():
    good = [[[[1]], [[2]]], [[["3"]], [[4]]], [[[5]], [[6]]]]
    made = tasks.from_pairs(good, 10)
    assert made == {
        "task_id": "task_0000000a",
        "train": [{"input": [[1]], "output": [[2]]}, {"input": [[3]], "output": [[4]]}],
        "test": [{"input": [[5]]}],
    }
    assert tasks.from_pairs(good[:1], 0) is None
    assert tasks.from_pairs([[[["x"]], [[1]]], good[0]], 0) is None
    assert tasks.from_pairs([good[0], [[["x"]], [[1]]]], 0) is None
    assert len(tasks.from_pairs([good[0], [[1]], good[2]], 0)["train"]) == 1


def test_streams_share_the_samples_in_turn_with_ids_of_the_whole(tmp_path):
    pair = [[[1]], [[2]]]
    samples = [[pair, pair] if n != 4 else [pair] for n in range(10)]
    done = tasks.write_streams(samples, 3, tmp_path, max_samples=8)
    assert done == {"streams": 3, "tasks": 7, "invalid": 1}
    ids = {
        path.name: [json.loads(line)["task_id"] for line in path.read_text().splitlines()]
        for path in sorted(tmp_path.iterdir())
    }
    assert ids == {
        "stream_000.jsonl": ["task_00000000", "task_00000003", "task_00000006"],
        "stream_001.jsonl": ["task_00000001", "task_00000007"],
        "stream_002.jsonl": ["task_00000002", "task_00000005"],
    }

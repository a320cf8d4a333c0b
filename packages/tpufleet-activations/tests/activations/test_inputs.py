"""Sample sources, tokenization and batching: an index always refers to the same sample."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.activations import tiny_model
from tests.examples import examples
from tpufleet.errors import BadInput, NotFound
from tpufleet_activations.inputs import sources, tokenization
from tpufleet_activations.inputs.samples import Sample
from tpufleet_activations.io import parquet_export, remote_files, shards, unit_writer
from tpufleet_activations.pipeline import batches


@pytest.fixture
def tokenizer(model_folder):
    return tokenization.Tokenizer(model_folder)


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
def test_every_kind_is_read_by_index(tmp_path, make):
    data = make(tmp_path / "data", 600)
    source = sources.open_source(data)
    assert source.count() == 600
    everything = texts(source)
    assert everything == [f"text {n}" for n in range(600)]
    for start, stop in [(0, 1), (255, 257), (511, 600), (13, 13)]:
        samples = source.read(range(start, stop))
        assert [sample.text for sample in samples] == everything[start:stop]
        assert [sample.index for sample in samples] == list(range(start, stop))
    assert sources.open_source({**data, "max_samples": 5}).count() == 5
    assert sources.open_source(data).digest() == source.digest()
    assert sources.open_source({**data, "max_samples": 5}).digest() != source.digest()


def test_several_files_are_one_source_sorted_by_name(tmp_path):
    for name, span in {"b": range(300, 400), "a": range(300)}.items():
        lines = (json.dumps({"text": f"text {n}"}) for n in span)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    for path in (tmp_path, tmp_path / "*.jsonl"):
        source = sources.open_source({"kind": "jsonl", "path": str(path)})
        assert texts(source) == [f"text {n}" for n in range(400)]
        assert [sample.text for sample in source.read(range(298, 302))] == [
            f"text {n}" for n in range(298, 302)
        ]


def test_changed_content_changes_the_digest(tmp_path):
    data = make_jsonl(tmp_path / "a.jsonl", 10)
    before = sources.open_source(data).digest()
    path = tmp_path / "a.jsonl"
    path.write_text(path.read_text().replace("text 7", "text 8"))
    assert sources.open_source(data).digest() != before


@pytest.mark.parametrize(
    "name, content, kind",
    [
        ("a.jsonl", '{"text": "x"}', "jsonl"),
        ("a.jsonl", "not json", "jsonl"),
        ("a.parquet", "", "parquet"),
        ("a.txt", "x", "text"),
    ],
)
def test_the_kind_is_detected_from_the_name_and_the_first_line(tmp_path, name, content, kind):
    (tmp_path / name).write_text(content)
    assert sources.detect_kind(str(tmp_path / name)) == kind
    assert sources.detect_kind(str(tmp_path)) == kind


MIXED_FOLDERS = {
    "a.jsonl b.parquet": "jsonl and parquet data.*--kind jsonl.parquet",
    "a.jsonl b.parquet c.txt": r"jsonl, parquet and text data.*\*\.jsonl",
    "a.parquet c.txt": "parquet and text data",
}


@pytest.mark.parametrize("names, message", MIXED_FOLDERS.items(), ids=list(MIXED_FOLDERS))
def test_a_folder_with_data_of_several_kinds_is_refused(tmp_path, names, message):
    for name in names.split():
        (tmp_path / name).write_text("x")
    with pytest.raises(BadInput, match=message):
        sources.detect_kind(str(tmp_path))


@pytest.mark.parametrize(
    "names, kind",
    [
        ("a.jsonl README.md", "jsonl"),
        ("a.jsonl README.txt LICENSE.txt", "jsonl"),
        ("a.jsonl dataset_info.json", "jsonl"),
        ("a.jsonl .b.parquet .notes.txt", "jsonl"),
        ("a.parquet dataset_info.json README.md", "parquet"),
        ("a.txt metadata.json", "text"),
        ("README.txt", "text"),
        ("other.json", "jsonl"),
    ],
)
def test_files_beside_the_data_do_not_change_its_kind(tmp_path, names, kind):
    for name in names.split():
        (tmp_path / name).write_text("{}")
    assert sources.detect_kind(str(tmp_path)) == kind


@pytest.mark.parametrize(
    "name, message",
    [
        ("a.jsonl.gz", "files are not read: .*a.jsonl.gz; decompress it"),
        ("a.txt.zst", "compressed and CSV files are not read"),
        ("a.jsonl.bz2", "compressed and CSV files are not read"),
        ("a.csv.xz", "compressed and CSV files are not read"),
        ("a.csv", "files are not read: .*a.csv; .* convert it to JSONL"),
        ("a.tsv", "CSV files are not read"),
    ],
)
def test_compressed_and_csv_files_are_refused(tmp_path, name, message):
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(BadInput, match=message):
            sources.detect_kind(str(path))
    if name.endswith(sources.COMPRESSED):
        for kind in ("jsonl", "text", "parquet"):
            with pytest.raises(BadInput, match=message):
                sources.open_source({"kind": kind, "path": str(tmp_path / name)})


@pytest.mark.parametrize(
    "record, reason",
    [
        ({"messages": None}, "field 'messages' is null instead of a list"),
        ({"tokens": "1 2"}, "field 'tokens' is of type str instead of a list"),
        ({"messages": None, "text": 7}, "field 'text' is of type int instead of text"),
        ({"body": "a"}, "no text field 'text'; fields: body"),
    ],
)
def test_a_skipped_record_names_the_field_that_it_lacks(record, reason):
    assert sources.sample_from_record(record, 0, None, None).skip_reason == reason


def test_invalid_sources_are_rejected_with_a_message(tmp_path):
    with pytest.raises(BadInput, match="kind"):
        sources.open_source({"kind": "csv", "path": "x"})
    with pytest.raises(NotFound):
        sources.open_source({"kind": "jsonl", "path": str(tmp_path / "none.jsonl")})
    with pytest.raises(NotFound, match="no data at"):
        sources.detect_kind(str(tmp_path / "something"))
    (tmp_path / "something").touch()
    with pytest.raises(BadInput, match="--kind"):
        sources.detect_kind(str(tmp_path / "something"))


@pytest.mark.parametrize(
    "name, content, kind",
    [
        ("a.parquet", b"not parquet at all", "parquet"),
        ("state.json", b"{", "hf"),
        ("state.json", b'{"_data_files": [{"filename": "a.arrow"}]}', "hf"),
    ],
)
def test_a_damaged_table_is_reported(tmp_path, name, content, kind):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "a.arrow").write_bytes(b"nor arrow")
    with pytest.raises(BadInput, match="cannot read"):
        sources.open_source({"kind": kind, "path": str(tmp_path)})


def odd_columns():
    """Values without an equal in Python's datetime: of other precision, range or time zone."""
    import pyarrow as pa

    nanoseconds = pa.timestamp("ns")
    return {
        "nanoseconds": pa.array([1000, 1_700_000_000_123_456_789], nanoseconds),
        "duration": pa.array([1000, 1_234_567], pa.duration("ns")),
        "time": pa.array([1000, 1_234_567], pa.time64("ns")),
        "far": pa.array([0, 10**13], pa.timestamp("s")),
        "zone": pa.array([0, 1_700_000_000], pa.timestamp("s", tz="Mars/Base")),
        "day": pa.array([0, 10**8], pa.date32()),
        "nested": pa.array(
            [[{"at": 1000}], [{"at": 1_700_000_000_123_456_789}]],
            pa.list_(pa.struct({"at": nanoseconds})),
        ),
    }


ODD_COLUMNS = ("nanoseconds", "duration", "time", "far", "zone", "day", "nested")


@pytest.fixture
def without_pandas(monkeypatch):
    """With pandas, pyarrow has values for some of them; extraction does not install it."""
    monkeypatch.setitem(sys.modules, "pandas", None)


@pytest.mark.parametrize("kind", ["parquet", "hf"])
@pytest.mark.parametrize("name", ODD_COLUMNS)
def test_a_column_that_python_cannot_represent_costs_no_rows(tmp_path, without_pandas, name, kind):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": ["one", "two"], name: odd_columns()[name]})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path)
    if kind == "hf":
        path = tmp_path
        with pyarrow.ipc.new_stream(path / "a.arrow", table.schema) as writer:
            writer.write_table(table)
        (path / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    data = {"kind": kind, "path": str(path)}
    assert texts(sources.open_source(data)) == ["one", "two"]
    # As an id, it is the same however the samples are divided into units.
    named = sources.open_source({**data, "id_field": name})
    ids = [sample.id for sample in named.read(range(2))]
    assert ids == [named.read(range(n, n + 1))[0].id for n in range(2)]
    assert len(set(ids)) == 2 and "None" not in ids
    assert [record["text"] for record in sources.read_records(str(path))] == ["one", "two"]
    other = sources.open_source({**data, "text_field": "body"}).read(range(1))[0]
    assert other.skip_reason == f"no text field 'body'; fields: {', '.join(sorted([name, 'text']))}"


def test_messages_with_odd_times_are_read(tmp_path, without_pandas):
    import pyarrow as pa
    import pyarrow.parquet

    message = pa.struct({"role": pa.string(), "content": pa.string(), "at": pa.timestamp("ns")})
    chat = [{"role": "user", "content": "hi", "at": 1_700_000_000_123_456_789}]
    table = pa.table({"messages": pa.array([chat], pa.list_(message))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    source = sources.open_source({"kind": "parquet", "path": str(tmp_path)})
    (read,) = source.read(range(1))[0].messages
    # A pandas.Timestamp, where pyarrow has imported pandas before.
    assert (read["content"], str(read["at"])) == ("hi", "2023-11-14 22:13:20.123456789")


def test_a_damaged_page_costs_only_its_row_group(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path, count = tmp_path / "a.parquet", 600
    chance = np.random.default_rng(0)
    lines = [chance.bytes(40).hex() for _ in range(count)]
    pyarrow.parquet.write_table(
        pyarrow.table({"text": lines}), path, row_group_size=200, data_page_size=1024,
        use_dictionary=False, write_batch_size=10, compression="snappy",
    )  # fmt: skip
    metadata = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    middle = metadata.data_page_offset + metadata.total_compressed_size // 2
    content[middle : middle + 64] = b"\xff" * 64
    path.write_bytes(content)

    source = sources.open_source({"kind": "parquet", "path": str(path)})
    samples = source.read(range(count))
    assert [sample.index for sample in samples] == list(range(count))
    assert all(sample.text in (None, line) for sample, line in zip(samples, lines, strict=True))
    lost = [sample for sample in samples if sample.skip_reason]
    assert [sample.index for sample in lost] == list(range(200, 400))
    assert "row group 1 of a.parquet is damaged" in lost[0].skip_reason
    # Any way of dividing the samples into units gives the same ones.
    again = [
        sample for start in range(0, count, 50) for sample in source.read(range(start, start + 50))
    ]
    assert again == samples
    with pytest.raises(BadInput, match="row group 1"):
        list(sources.read_records(str(path)))


COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("models/my model", "neither a folder here nor a name on the Hugging Face Hub"),
        ("models/a--b", "neither a folder here nor a name on the Hugging Face Hub"),
        ("models/.hidden", "neither a folder here nor a name on the Hugging Face Hub"),
        (f"models/my model@{COMMIT}", "neither a folder here nor a name on the Hugging Face Hub"),
        ("Qwen/Qwen2.5-0.5B@main", "is not a commit, of 40 hexadecimal digits"),
        ("Qwen/Qwen2.5-0.5B@", "is not a commit, of 40 hexadecimal digits"),
        ("Qwen/Qwen2.5-0.5B@refs/pr/1", "is not a commit, of 40 hexadecimal digits"),
        ("Qwen2.5", "no model at Qwen2.5"),
    ],
)
def test_a_name_that_is_not_on_the_hub_is_refused(name, message):
    with pytest.raises((BadInput, NotFound), match=re.escape(message)):
        remote_files.model_folder(name)


def test_a_commit_of_a_model_is_read_from_the_hub(tmp_path):
    snapshots = tmp_path / "models--lab--tiny" / "snapshots"
    for commit in (COMMIT, COMMIT[::-1]):
        (snapshots / commit).mkdir(parents=True)
        (snapshots / commit / "config.json").write_text("{}")
    code = "import sys; from tpufleet_activations.io import remote_files\n"
    code += "print(remote_files.model_folder(sys.argv[1]))"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, f"lab/tiny@{COMMIT}"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == str(snapshots / COMMIT), done.stderr
    assert parquet_export.model_name(f"lab/tiny@{COMMIT}") == "lab/tiny"


BAD_RECORDS = {
    "messages-of-text": {"messages": ["hello"]},
    "message-is-null": {"messages": [None]},
    "message-is-number": {"messages": [3]},
    "content-is-missing": {"messages": [{"role": "user"}]},
    "content-is-null": {"messages": [{"role": "user", "content": None}]},
    "content-is-list": {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    "content-is-number": {"messages": [{"role": "user", "content": 3}]},
    "role-is-list": {"messages": [{"role": [], "content": "x"}]},
    "lone-surrogate": {"messages": [{"role": "user", "content": "\ud800"}]},
    "surrogate-in-id": {"id": "\ud800", "text": "fine"},
    "text-is-number": {"text": 3},
    "tokens-of-text": {"tokens": ["a"]},
    "tokens-too-large": {"tokens": [2**70]},
    "tokens-nested": {"tokens": [[1]]},
}
# Chat templates do arithmetic, look up keys and call methods on what they are given.
STRICT_TEMPLATE = (
    "{% for message in messages %}{{ {'user': 'U', 'system': 'S'}[message.role] }}"
    "{{ message['content'].strip() + 'end' }}{{ 10 // (message['content'] | length) }}{% endfor %}"
)


@pytest.mark.parametrize("record", BAD_RECORDS.values(), ids=BAD_RECORDS)
@pytest.mark.parametrize("template", [tiny_model.TEMPLATE, STRICT_TEMPLATE, "{{", ""])
def test_one_bad_sample_does_not_stop_the_others(tmp_path, model_folder, record, template):
    folder = tmp_path / "tokenizer"
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    deep = "[" * 100_000
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(['{"text": "fine"}', json.dumps(record), deep, '{"text": "too"}']))
    source = sources.open_source({"kind": "jsonl", "path": str(path)})
    samples = tokenization.tokenize(
        source.read(range(4)), tokenization.Tokenizer(folder), max_length=50, too_long="skip"
    )
    assert [len(samples[n].tokens) for n in (0, 2, 3)] == [4, 0, 3]
    assert len(samples[1].tokens) or samples[1].metadata["skipped"]
    tables = unit_writer._tables(
        [
            unit_writer.StoredSample(
                sample=n, tokens=sample.tokens, positions=sample.tokens, metadata=sample.metadata
            )
            for n, sample in enumerate(samples)
        ]
    )
    assert len(json.loads(tables[shards.METADATA].tobytes())) == 4


def test_a_damaged_tokenizer_is_reported(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadInput, match=r"cannot read .*tokenizer\.json"):
        tokenization.Tokenizer(tmp_path)


# -- tokens -------------------------------------------------------------------------------------


def test_an_unusable_sample_keeps_its_index_and_has_a_reason(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\nnot json\n{"other": 1}\n{"text": ""}\n[1]\n')
    source = sources.open_source({"kind": "jsonl", "path": str(path)})
    samples = tokenization.tokenize(
        source.read(range(5)), tokenizer, max_length=50, too_long="skip"
    )
    assert [len(sample.tokens) for sample in samples] == [4, 0, 0, 0, 0]
    reasons = [sample.metadata.get("skipped", "") for sample in samples]
    assert "JSON" in reasons[1] and "other" in reasons[2] and reasons[3] == "no tokens"


@pytest.mark.parametrize(
    "sample, reason",
    [
        ({"text": "lone \ud800 half"}, "not Unicode"),
        ({"tokens": [1, "two"]}, "integers"),
        ({"tokens": [1, True]}, "integers"),
        ({"tokens": [1, 61]}, "token 61 is outside the vocabulary of 61"),
        ({"tokens": [-1, 3]}, "token -1 is outside"),
        ({"messages": [{"role": "jester", "content": "hi"}]}, "no jesters"),
        ({"messages": [3]}, "template"),
        ({"messages": [{"role": "user", "content": {"no": "text"}}]}, "template"),
    ],
)
def test_an_untokenizable_sample_does_not_affect_others(model_folder, tmp_path, sample, reason):
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    template = (
        "{% for message in messages %}"
        "{% if message.role == 'jester' %}{{ raise_exception('no jesters') }}{% endif %}"
        "{{ message.role + message.content }}{% endfor %}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    both = [Sample(index=0, id="a", **sample), Sample(index=1, id="b", text="fine")]
    strict = tokenization.Tokenizer(tmp_path)
    samples = tokenization.tokenize(both, strict, max_length=50, too_long="skip", vocabulary=61)
    assert [len(one.tokens) for one in samples] == [0, 4]
    assert reason in samples[0].metadata["skipped"]


@pytest.mark.parametrize("split", [None, "file"])
def test_text_that_is_not_utf_8_is_skipped_with_the_reason(tmp_path, split):
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9 in latin-1\nplain\n")
    source = sources.open_source({"kind": "text", "path": str(path), "split": split})
    first, *rest = source.read(range(source.count()))
    assert "not UTF-8" in first.skip_reason
    assert [sample.text for sample in rest] == (["plain"] if split is None else [])


def test_a_long_sample_is_skipped_cut_or_rejected(tokenizer):
    sample = Sample(index=3, id="x", text="a" * 20)
    skip, cut = (
        tokenization.tokenize([sample], tokenizer, max_length=8, too_long=how)[0]
        for how in ("skip", "cut")
    )
    assert (len(skip.tokens), skip.metadata["full_length"]) == (0, 20)
    assert (len(cut.tokens), cut.metadata["full_length"]) == (8, 20)
    with pytest.raises(BadInput, match="20 tokens"):
        tokenization.tokenize([sample], tokenizer, max_length=8, too_long="refuse")


def test_token_ids_are_used_unchanged(tokenizer):
    sample = Sample(index=0, id="x", tokens=[5, 6, 7])
    samples = tokenization.tokenize([sample], tokenizer, max_length=8, too_long="skip")[0]
    assert samples.tokens.tolist() == [5, 6, 7]


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


@settings(max_examples=examples(80), deadline=None)
@given(
    lengths=LENGTHS,
    batching=st.sampled_from(["bucket", "pack", "varlen"]),
    batch_tokens=st.integers(1, 200),
    multiple=st.sampled_from([1, 2, 8]),
)
def test_every_sample_is_in_exactly_one_batch_with_its_own_tokens(
    lengths, batching, batch_tokens, multiple
):
    tokens = [np.full(size, n + 1, np.int32) for n, size in enumerate(lengths)]
    made_batches = list(
        batches.make_batches(
            tokens,
            batching=batching,
            buckets=(8, 16, 40),
            batch_tokens=batch_tokens,
            row_multiple=multiple,
        )
    )
    spans = [span for batch in made_batches for span in batch.spans]
    assert sorted(span.sample for span in spans) == [n for n, size in enumerate(lengths) if size]
    for batch in made_batches:
        assert batch.tokens.shape[0] % multiple == 0
        assert batch.tokens.shape == batch.positions.shape
        for span in batch.spans:
            columns = slice(span.start, span.start + span.length)
            np.testing.assert_array_equal(batch.tokens[span.row, columns], tokens[span.sample])
            assert batch.positions[span.row, columns].tolist() == list(range(span.length))
    assert sum(batch.real_tokens for batch in made_batches) == sum(lengths)


def test_sample_order_does_not_depend_on_the_number_of_devices():
    chance = Random(0)
    tokens = [np.ones(chance.randint(1, 40), np.int32) for _ in range(50)]
    orders = {
        tuple(
            span.sample
            for batch in batches.make_batches(
                tokens, batching="bucket", buckets=(16, 40), batch_tokens=size, row_multiple=many
            )
            for span in batch.spans
        )
        for size, many in [(40, 1), (160, 4), (500, 8)]
    }
    assert len(orders) == 1


def lognormal(count: int, median: float = 266.0, sigma: float = 1.2) -> np.ndarray:
    """Lengths of web text and chats: few samples are long, and those hold most of the tokens."""
    chance = np.random.default_rng(0)
    return np.clip(chance.lognormal(np.log(median), sigma, count), 1, 2048).astype(int)


@pytest.mark.parametrize("multiple", [1, 8])
def test_the_shape_of_a_sample_does_not_depend_on_the_samples_beside_it(multiple):
    """So that a unit has the same bits alone, beside others, and when it is built again."""
    lengths = lognormal(400)

    def shapes(chosen: np.ndarray) -> dict[int, tuple[int, ...]]:
        made_batches = batches.make_batches(
            [np.ones(lengths[n], np.int32) for n in chosen],
            batching="bucket",
            buckets=batches.choose_buckets(lengths, 2048),
            batch_tokens=8192,
            row_multiple=multiple,
        )
        return {chosen[s.sample]: b.tokens.shape for b in made_batches for s in b.spans}

    together = shapes(np.arange(400))
    for part in np.array_split(np.arange(400), 7):
        assert shapes(part).items() <= together.items()


@pytest.mark.parametrize("max_length", [2048, 2000, 512, 8192])
@pytest.mark.parametrize("median", [60, 266, 900])
def test_few_lengths_pad_little(median, max_length):
    lengths = np.minimum(lognormal(4000, median), max_length)
    chosen = batches.choose_buckets(lengths[:512], max_length)  # as planned from 512 samples
    assert len(chosen) <= batches.MOST_BUCKETS + 1
    assert chosen[-1] == max_length and list(chosen) == sorted(set(chosen))
    padded = np.array(chosen)[np.searchsorted(chosen, lengths)].sum()
    table = np.array(batches.buckets_up_to(max_length))
    assert padded <= table[np.searchsorted(table, lengths)].sum()
    assert 1 - lengths.sum() / padded < (0.25 if median == 60 else 0.10)


@pytest.mark.parametrize(
    "lengths, expected",
    [([], (2048,)), ([0, 0], (2048,)), ([64] * 9, (64, 2048)), ([2048, 1], (64, 2048))],
)
def test_only_lengths_that_occur_are_chosen(lengths, expected):
    assert batches.choose_buckets(lengths, 2048) == expected


@pytest.mark.parametrize(
    "tokens, size", [(0, 2048), (30_000, 2048), (2_000_000, 4096), (9_300_000, 32768)]
)
def test_batches_of_small_datasets_are_small(tokens, size):
    assert batches.choose_batch_tokens(tokens, buckets=16) == size


@pytest.mark.parametrize("median", [30, 266, 900])
@pytest.mark.parametrize("multiple", [1, 8])
def test_rows_of_many_samples_have_one_shape_and_hardly_any_padding(median, multiple):
    lengths = lognormal(40_000 * 30 // median, median)
    made_batches = list(
        batches.make_batches(
            [np.ones(size, np.int32) for size in lengths],
            batching="varlen",
            buckets=(512, 2048),
            batch_tokens=32768 * multiple,
            row_multiple=multiple,
        )
    )
    empty = batches.empty_varlen((512, 2048), 32768 * multiple, multiple)
    assert {batch.tokens.shape for batch in made_batches} == {empty.tokens.shape}
    computed = sum(batch.tokens.size for batch in made_batches[:-1])
    real = sum(batch.real_tokens for batch in made_batches[:-1])
    assert computed < (1.20 if median == 30 else 1.05) * real


def test_rows_of_many_samples_fit_the_table_of_attention():
    """Tokens at a multiple of the tile's size start a tile, those of padding too."""
    lengths = [*lognormal(300), *[1] * 3000, *[130] * 300]
    for batch in batches.make_batches(
        [np.ones(size, np.int32) for size in lengths],
        batching="varlen",
        buckets=(2048,),
        batch_tokens=8192,
    ):
        length = batch.tokens.shape[1]
        for queries in (32, 64, 128, 256):
            tiles = (batch.positions % queries == 0).sum(axis=1)
            assert (tiles <= length // queries + batches.most_samples(length)).all()


def test_a_units_samples_keep_their_order_beside_other_units():
    lengths = lognormal(500)

    def order(chosen: range) -> list[int]:
        made_batches = batches.make_batches(
            [np.ones(lengths[n], np.int32) for n in chosen],
            batching="varlen",
            buckets=(2048,),
            batch_tokens=4096,
        )
        return [chosen[span.sample] for batch in made_batches for span in batch.spans]

    together = order(range(500))
    for part in (range(100), range(100, 350), range(350, 500)):
        assert order(part) == [n for n in together if n in part]


@pytest.mark.parametrize("batching", ["bucket", "varlen"])
def test_samples_of_one_length_come_from_all_units(batching):
    """One thread at a time can write to a file, so a batch has rows for the files of all units."""
    units = [unit for unit in range(4) for _ in range(24)]
    made = list(
        batches.make_batches(
            [np.ones(64, np.int32) for _ in units],
            batching=batching,
            buckets=(64,),
            batch_tokens=64 * 16,
            units=units,
        )
    )
    for batch in made:
        beside = [units[span.sample] for span in batch.spans]
        assert beside == sorted([*range(4)] * 4)  # adjacent, and as many of each
    for unit in range(4):
        order = [s.sample for batch in made for s in batch.spans if units[s.sample] == unit]
        assert order == [*range(24 * unit, 24 * (unit + 1))]


@pytest.mark.parametrize(
    "planned, lengths, varlen, used",
    [
        ("auto", 16, True, "varlen"),
        ("auto", 16, False, "bucket"),
        ("auto", 2, True, "bucket"),
        ("pack", 16, True, "varlen"),
        ("pack", 1, True, "varlen"),
        ("pack", 16, False, "pack"),
        ("bucket", 16, True, "bucket"),
    ],
)
def test_devices_and_lengths_decide_how_samples_are_batched(planned, lengths, varlen, used):
    assert batches.resolve_batching(planned, range(lengths), varlen=varlen) == used


def test_bucketing_pads_far_less_than_padding_to_the_maximum():
    chance = np.random.default_rng(0)
    lengths = np.clip(chance.lognormal(6, 0.6, 2_000), 1, 2048).astype(int)
    made_batches = batches.make_batches(
        [np.ones(size, np.int32) for size in lengths],
        batching="bucket",
        buckets=batches.choose_buckets(lengths, 2048),
        batch_tokens=batches.choose_batch_tokens(lengths.sum(), 16),
    )
    computed = sum(batch.tokens.size for batch in made_batches)
    assert computed < 1.12 * lengths.sum()
    assert computed < 0.35 * 2048 * len(lengths)


@pytest.mark.parametrize("length, largest", [(2048, 2048), (100, 100), (5000, 5000)])
def test_the_largest_bucket_is_max_length(length, largest):
    table = batches.buckets_up_to(length)
    assert table[-1] == largest and list(table) == sorted(set(table))


@pytest.mark.parametrize(
    ("record", "id_field", "wanted"),
    [
        ({"id": "a"}, None, "a"),
        ({"id": 0}, None, "0"),
        ({"id": None}, None, "7"),
        ({"task_id": "t"}, None, "t"),
        ({"uid": "u", "id": "a"}, "uid", "u"),
        ({"uid": None, "id": "a"}, "uid", "7"),
    ],
)
def test_a_sample_without_an_id_has_its_number(record, id_field, wanted):
    sample = sources.sample_from_record({"text": "x", **record}, 7, None, id_field)
    assert (sample.id, sample.skip_reason) == (wanted, "")


def test_a_field_of_ids_that_does_not_exist_is_reported():
    sample = sources.sample_from_record({"text": "x", "id": "a"}, 7, None, "uidd")
    assert sample.skip_reason == "no id field 'uidd'; fields: id, text"

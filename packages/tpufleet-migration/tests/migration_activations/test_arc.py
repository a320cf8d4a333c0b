"""ARC tasks as samples: augmentations, grid encoders, prompts."""

from __future__ import annotations

import json
import zipfile
from random import Random

import pytest

from tests.activations.tiny_model import task
from tpufleet.agent import own_wheel
from tpufleet.errors import BadInput
from tpufleet_activations.inputs import sources
from tpufleet_migration.activations.arc import (
    grid_encoders,
    prompts,
    tasks,
)


def write_tasks(path, count, tests=1):
    path.write_text("\n".join(json.dumps(task(n, tests)) for n in range(count)))
    return {"kind": "arc", "path": str(path)}


def test_a_task_gives_eight_augmentations_of_each_test(tmp_path):
    source = sources.open_source(write_tasks(tmp_path / "t.jsonl", 5, tests=2))
    assert source.count() == 5 * 8 * 2
    samples = source.read(range(source.count()))
    assert len({sample.id for sample in samples}) == 80
    turns = [
        (sample.metadata["augmentation"]["hflip"], sample.metadata["augmentation"]["n_rot90"])
        for sample in samples[:16:2]
    ]
    assert sorted(turns) == sorted(tasks.DIHEDRAL)
    more = sources.open_source({**write_tasks(tmp_path / "t.jsonl", 5), "predictions_per_task": 12})
    assert more.count() == 5 * 12  # not rounded to a multiple of eight


def test_prompts_are_deterministic_and_depend_on_the_seed(tmp_path):
    data = write_tasks(tmp_path / "t.jsonl", 6, tests=2)
    whole = sources.open_source(data).read(range(96))
    pieces = [
        sample
        for start in range(0, 96, 7)
        for sample in sources.open_source(data).read(range(start, min(start + 7, 96)))
    ]
    assert whole == pieces
    assert sources.open_source({**data, "seed": "43"}).read(range(96)) != whole


def test_about_ten_percent_of_augmentations_recolor_the_background():
    chance = Random(1)
    changed = sum(tasks.make_augmentation(task(0), n, chance).colors[0] != 0 for n in range(3_000))
    assert 200 < changed < 340  # a shuffle leaves it in place one time in ten


def test_an_invalid_task_keeps_its_index(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join([json.dumps(task(0)), "{", '{"train": []}', json.dumps(task(3))]))
    samples = sources.open_source({"kind": "arc", "path": str(path)}).read(range(32))
    assert [bool(sample.skip_reason) for sample in samples] == [False] * 8 + [True] * 16 + [
        False
    ] * 8
    assert samples[24].id.startswith("task_00000003")


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
        (grid_encoders.DEFAULT, "```grid shape: 2x3\n1 012\n2 345\n```"),
    ],
)
def test_grid_encoders_produce_the_documented_text(name, text):
    assert grid_encoders.parse_encoder(name)(GRID) == text


@pytest.mark.parametrize(
    "name",
    ["__import__('os').system('true')", "Minimal()", "MinimalGridEncoder(", "open('x')", "1+1"],
)
def test_an_invalid_encoder_expression_is_rejected_and_not_evaluated(name):
    with pytest.raises(BadInput):
        grid_encoders.parse_encoder(name)(GRID)


def test_the_default_prompt_shows_the_examples_then_the_test_case():
    one = {"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[3]]}]}
    encode = grid_encoders.parse_encoder("MinimalGridEncoder()")
    prompt = prompts.VERSIONS[prompts.DEFAULT].prompts(one, encode)[0]
    assert prompt.system.startswith("You solve puzzles from the Abstraction and Reasoning Corpus")
    assert prompt.user == (
        "Here is a puzzle from the Abstraction and Reasoning Corpus (ARC).\n"
        "The pairs of grids below show what becomes of an input grid.\n"
        "\n## Example 1\n\n### Input\n\n1\n\n### Output\n\n2\n"
        "\n## Test case\n\n### Input\n\n3"
    )
    assert prompt.answer == "### Output\n\n```grid"


@pytest.mark.parametrize("version", sorted(prompts.VERSIONS))
def test_every_prompt_version_contains_its_required_fields(version):
    one = {**task(1), "code": "def task(grid): ...", "test_output_choices": [[[7]], [[8]]]}
    encode = grid_encoders.parse_encoder("MinimalGridEncoder()")
    prompt = prompts.VERSIONS[version].prompts(one, encode)[0]
    shown = {"input-from-inputs-v0": "input", "output-from-outputs-v0": "output"}
    if version != "output-from-code-v0":
        assert encode(one["train"][0][shown.get(version, "input")]) in prompt.user
    needed = {"output-from-code": "def task", "select": "option 2", "verify": "### Output"}
    for start, text in needed.items():
        assert not version.startswith(start) or text in prompt.user


def test_a_task_without_the_fields_of_its_prompt_version_is_rejected():
    encode = grid_encoders.parse_encoder("MinimalGridEncoder()")
    with pytest.raises(BadInput, match="code"):
        prompts.VERSIONS["output-from-code-v0"].prompts(task(1), encode)


def test_pairs_are_converted_to_tasks():
    good = [[[[1]], [[2]]], [[["3"]], [[4]]], [[[5]], [[6]]]]
    converted = tasks.task_from_pairs(good, 10)
    assert converted == {
        "task_id": "task_0000000a",
        "train": [{"input": [[1]], "output": [[2]]}, {"input": [[3]], "output": [[4]]}],
        "test": [{"input": [[5]]}],
    }
    assert tasks.task_from_pairs(good[:1], 0) is None
    assert tasks.task_from_pairs([[[["x"]], [[1]]], good[0]], 0) is None
    assert tasks.task_from_pairs([good[0], [[["x"]], [[1]]]], 0) is None
    assert len(tasks.task_from_pairs([good[0], [[1]], good[2]], 0)["train"]) == 1


def test_samples_are_distributed_round_robin_over_streams_with_global_ids(tmp_path):
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


@pytest.mark.parametrize(
    "grid",
    [[[1, 2], [3]], [[10]], [[-1]], [[1.0]], [[True]], [[]], [], "12", [["1"]]],
    ids=["ragged", "ten", "negative", "float", "bool", "empty-row", "empty", "text", "digits"],
)
def test_an_invalid_grid_skips_only_its_own_task(tmp_path, grid):
    broken = {**task(1), "test": [{"input": grid}]}
    (tmp_path / "t.jsonl").write_text(f"{json.dumps(task(0))}\n{json.dumps(broken)}\n")
    samples = sources.open_source({"kind": "arc", "path": str(tmp_path / "t.jsonl")}).read(
        range(16)
    )
    assert [bool(sample.skip_reason) for sample in samples] == [False] * 8 + [True] * 8
    assert "grid" in samples[8].skip_reason and samples[8].id.startswith("task_00000001")


def test_duplicate_task_ids_are_made_unique(tmp_path):
    path = tmp_path / "t.jsonl"
    nameless = {name: value for name, value in task(0).items() if name != "task_id"}
    path.write_text("\n".join(json.dumps(one) for one in [task(0), task(1), task(0), nameless]))
    samples = sources.open_source({"kind": "arc", "path": str(path)}).read(range(32))
    names = [sample.metadata["task_id"] for sample in samples[::8]]
    assert names == ["task_00000000", "task_00000001", "task_00000000_00000002", "task_00000003"]
    assert len({sample.id for sample in samples}) == 32


def test_a_task_that_lacks_a_prompt_field_is_skipped_and_others_are_kept(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in [task(0), {**task(1), "code": "x = 1"}]))
    data = {"kind": "arc", "path": str(path), "prompt_version": "output-from-code-v0"}
    samples = sources.open_source(data).read(range(16))
    assert "'code' is undefined" in samples[0].skip_reason
    assert "x = 1" in samples[8].messages[1]["content"]


# -- custom prompts

OWN = {
    "system": "You are a solver.",
    "user": "{% for sample in train_samples %}In:\n{{ sample.input }}\nOut:\n{{ sample.output }}\n"
    "{% endfor %}Now:\n{{ test_input }}",
    "answer": "### Output\n\n```grid",
}


def test_a_custom_prompt_template_is_rendered(tmp_path):
    pairs = [{"input": [[1, 1]], "output": [[2, 2]]}]
    one = {"train": pairs, "test": [{"input": [[3, 3]]}]}
    (tmp_path / "t.jsonl").write_text(json.dumps(one))
    data = {"kind": "arc", "path": str(tmp_path / "t.jsonl"), "prompt": json.dumps(OWN)}
    data["grid_encoder"] = "MinimalGridEncoder()"
    source = sources.open_source(data)
    sample = source.read(range(1))[0]
    change = sample.metadata["augmentation"]["colors"]
    assert sample.messages[0] == {"role": "system", "content": "You are a solver."}
    assert sample.messages[1]["content"] == (
        f"In:\n{change[1]}{change[1]}\nOut:\n{change[2]}{change[2]}\nNow:\n{change[3]}{change[3]}"
    )
    assert sample.answer == "### Output\n\n```grid"
    other = sources.open_source({**data, "prompt": json.dumps({**OWN, "system": "Other."})})
    assert other.digest() != source.digest()


def test_a_prompt_file_is_read_and_its_errors_are_reported(tmp_path):
    path = tmp_path / "prompt.toml"
    path.write_text('system = "s"\nuser = """{{ test_input }}"""\nanswer = "a"\n')
    assert prompts.read_template(path) == {
        "system": "s",
        "user": "{{ test_input }}",
        "answer": "a",
    }
    for text, message in [
        ('system = "s"', "system, user, answer"),
        ('system = "s"\nuser = "{% for %}"\nanswer = ""', "line 1"),
        ("system =", "cannot read"),
    ]:
        path.write_text(text)
        with pytest.raises(BadInput, match=message):
            prompts.read_template(path)


def test_an_undefined_template_variable_skips_the_task(tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps(task(0)))
    prompt = {**OWN, "user": "{{ code }}"}
    data = {"kind": "arc", "path": str(tmp_path / "t.jsonl"), "prompt": json.dumps(prompt)}
    assert "'code' is undefined" in sources.open_source(data).read(range(1))[0].skip_reason


def test_a_prompt_template_is_sandboxed(tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps(task(0)))
    prompt = {**OWN, "user": "{{ train_samples.__class__.__mro__ }}"}
    data = {"kind": "arc", "path": str(tmp_path / "t.jsonl"), "prompt": json.dumps(prompt)}
    assert "unsafe" in sources.open_source(data).read(range(1))[0].skip_reason


# -- streams


def test_some_of_the_streams_are_chosen_with_a_pattern(tmp_path):
    for number in range(4):
        path = tmp_path / f"stream_{number:03d}.jsonl"
        path.write_text("\n".join(json.dumps(task(n)) for n in (number, number + 4)))
    chosen = str(tmp_path / "stream_00[1-2].jsonl")
    assert sources.detect_kind(chosen) == "arc"
    source = sources.open_source({"kind": "arc", "path": chosen, "predictions_per_task": 1})
    samples = source.read(range(source.count()))
    assert [int(sample.metadata["task_id"][-2:]) for sample in samples] == [1, 5, 2, 6]


def test_hosts_know_the_kind_of_data_too(tmp_path):
    with zipfile.ZipFile(own_wheel.build(tmp_path)) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith("/entry_points.txt")]
        assert "tpufleet_migration.activations.arc.source" in wheel.read(name).decode()

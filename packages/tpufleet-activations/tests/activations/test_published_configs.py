"""Published configurations of every supported family, and what happens to absent and odd keys.

`published_configs.json` has the config.json files of the models on the Hugging Face Hub.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.activations.test_decoder import CLOSE, FIXTURES, everything, run
from tpufleet.errors import BadInput
from tpufleet_activations.model import architectures, families, sites, weights

PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())
# Parameters in billions without output heads and vision towers, from the model cards' exact
# counts: hidden sizes, layers and vocabularies are all part of them.
BILLIONS = {
    "Qwen/Qwen2.5-0.5B": 0.494,
    "Qwen/Qwen2.5-7B": 7.616 - 0.545,
    "Qwen/Qwen3-4B": 4.022,
    "meta-llama/Llama-3.1-8B": 8.030 - 0.525,
    "meta-llama/Llama-3.2-1B": 1.236,
    "mistralai/Mistral-7B-v0.1": 7.242 - 0.131,
    "google/gemma-2b": 2.506,
    "google/gemma-7b": 8.538,
    "google/gemma-2-2b": 2.614,
    "google/gemma-2-27b": 27.227,
    "google/gemma-3-4b-pt": 3.880,
    "google/gemma-3-12b-pt": 11.766,
    "google/gemma-3-27b-pt": 27.009,
    "allenai/OLMo-2-1124-7B": 7.299 - 0.411,
    "microsoft/phi-4": 14.660 - 0.514,
    "HuggingFaceTB/SmolLM3-3B": 3.075,
    "ibm-granite/granite-3.1-8b-instruct": 8.171,
    "mistralai/Mixtral-8x7B-v0.1": 46.703 - 0.131,
    "Qwen/Qwen3-30B-A3B": 30.532 - 0.311,
}


def parse(config: dict) -> architectures.Architecture:
    return architectures.from_config(json.dumps(config))


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_configuration_is_accepted(name):
    arch = parse(PUBLISHED[name])
    assert len(arch.windowed) == len(arch.rope) == arch.layers


@pytest.mark.parametrize("name, billions", BILLIONS.items())
def test_sizes_add_up_to_the_published_number_of_parameters(name, billions):
    arch = parse(PUBLISHED[name])
    total = arch.parameter_count() + arch.vocabulary * arch.hidden
    assert total / 1e9 == pytest.approx(billions, rel=2e-3)


def reference(config: dict):
    """The text decoder that transformers builds, without memory for its weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    body = copy.deepcopy(config)
    parsed = transformers.AutoConfig.for_model(body.pop("model_type"), **body)
    parsed = getattr(parsed, "text_config", None) or parsed
    parsed.pad_token_id = None  # may be outside a default vocabulary
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(parsed, attn_implementation="eager")
    return parsed, model


def assert_same_model(config: dict) -> None:
    """Shapes and settings of every layer equal those of transformers' modules."""
    parsed, model = reference(config)
    arch = parse(config)
    names = families.FAMILIES[arch.family].names
    # transformers joins experts when it loads them.
    joined = lambda name: "mlp.experts." in name or "block_sparse_moe." in name
    theirs = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    ours = dict(weights.checkpoint_weights(arch, arch.layers, final_norm=True, head=False))
    assert {name: shape for name, shape in ours.items() if not joined(name)} == {
        name: shape
        for name, shape in theirs.items()
        if not (joined(name) or (arch.experts and ".mlp.gate." in name and name not in ours))
    }
    layers = model.h if arch.family == "gpt2" else model.layers
    for number, layer in enumerate(layers):
        attention = layer.get_submodule(names["out"].rpartition(".")[0])
        assert attention.scaling == pytest.approx(arch.attention_scale)
        assert getattr(attention, "attn_logit_softcapping", None) == arch.softcap
        # The window of some is part of the configuration alone.
        window = getattr(attention, "sliding_window", None)
        if arch.family in ("mistral", "mixtral", "phi3"):
            window = parsed.sliding_window
        assert (arch.window if arch.windowed[number] else None) == window
    first = layers[0]
    norm = first.get_submodule(names["attention_norm" if arch.pre_norms else "attention_post_norm"])
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    assert epsilon == arch.norm_epsilon
    function = getattr(first.mlp, "act_fn", None) or getattr(first.mlp, "act", None)
    kinds = {
        "silu": ("SiLUActivation", "SiLU"),
        "gelu_tanh": ("GELUTanh", "NewGELUActivation"),
        "gelu": ("GELUActivation",),
    }
    assert function is None or type(function).__name__ in kinds[arch.activation]
    scale = getattr(model, "embedding_multiplier", 1.0)
    scale *= getattr(model.get_submodule(names["embed"]), "scalar_embed_scale", 1.0)
    assert scale == pytest.approx(arch.embedding_scale)
    assert getattr(first, "residual_multiplier", 1.0) == arch.residual_scale
    if arch.experts:
        routed = getattr(first.mlp, "router", None) or first.mlp.gate
        assert (routed.num_experts, routed.top_k) == (arch.experts, arch.experts_per_token)
        assert getattr(routed, "norm_topk_prob", True) == arch.experts_normalized
    if arch.learned_positions:
        return
    rotary = type(model.rotary_emb)(parsed)
    rotated = [getattr(getattr(layer, "self_attn", None), "use_rope", 1) for layer in layers]
    for rope, is_local, turns in set(zip(arch.rope, arch.windowed, rotated, strict=True)):
        kind = "sliding_attention_" if is_local else "full_attention_"
        kind = kind if hasattr(rotary, f"{kind}inv_freq") else ""
        frequencies = getattr(rotary, f"{kind}inv_freq").numpy() * turns
        np.testing.assert_allclose(rope.frequencies, frequencies, rtol=1e-5)
        assert not turns or rope.scale == pytest.approx(getattr(rotary, f"{kind}attention_scaling"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_mean_what_transformers_reads(name):
    assert_same_model(PUBLISHED[name])


ONE_OF_EACH = {
    "qwen2": "Qwen/Qwen2.5-0.5B",
    "qwen3": "Qwen/Qwen3-0.6B",
    "llama": "meta-llama/Llama-3.2-1B",
    "mistral": "mistralai/Mistral-7B-v0.1",
    "gemma": "google/gemma-1.1-2b-it",
    "gemma2": "google/gemma-2-2b",
    "gemma3_text": "google/gemma-3-1b-pt",
    "olmo2": "allenai/OLMo-2-0425-1B",
    "olmo3": "allenai/Olmo-3-1025-7B",
    "gpt2": "openai-community/gpt2",
    "gpt_neox": "EleutherAI/pythia-410m",
    "phi3": "microsoft/phi-4",
    "smollm3": "HuggingFaceTB/SmolLM3-3B",
    "granite": "ibm-granite/granite-3.1-8b-instruct",
    "mixtral": "mistralai/Mixtral-8x7B-v0.1",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
    "gpt_oss": "openai/gpt-oss-20b",
}
ABSENT = [
    (family, key)
    for family, name in ONE_OF_EACH.items()
    for key in PUBLISHED[name]
    if families.FAMILIES[family].renamed.get(key, key) in families.FAMILIES[family].defaults
    # Default numbers of heads do not fit the others of these sizes.
    and (key != "num_key_value_heads" or family not in ("qwen2", "qwen3", "gemma"))
    and (key, family) != ("num_attention_heads", "phi3")
]
PER_LAYER = {"layer_types", "no_rope_layers"}


@pytest.mark.parametrize("family, key", ABSENT)
def test_an_absent_key_has_the_default_that_the_family_publishes(family, key):
    config = {name: value for name, value in PUBLISHED[ONE_OF_EACH[family]].items() if name != key}
    depth = "n_layer" if family == "gpt2" else "num_hidden_layers"
    if key == depth:
        config = {name: value for name, value in config.items() if not name.endswith("_types")}
    else:
        config[depth] = 8
        for name in PER_LAYER & set(config):
            config[name] = config[name][:8]
    assert_same_model(config)


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_a_configuration_without_any_key_is_the_default_of_the_family(family):
    assert_same_model({"model_type": family})


@pytest.mark.parametrize(
    "family, change, message",
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen2", {"is_causal": False}, "is_causal"),
        ("gemma2", {"hidden_activation": "mish"}, "activation function 'mish'"),
        ("llama", {"hidden_act": "relu"}, "activation function 'relu'"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 28, "use_sliding_window": True}, "chunk"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"sliding_window": 4096}, "sliding_window"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq'"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ("qwen2", {"num_experts": 8}, "num_experts"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv"),
        ("qwen2", {"hidden_size": None}, "hidden_size is null"),
    ],
)
def test_a_setting_that_is_not_supported_is_an_error_that_names_it(family, change, message):
    with pytest.raises(BadInput, match=message):
        parse({**PUBLISHED[ONE_OF_EACH[family]], **change})


def test_settings_without_effect_are_ignored():
    config = PUBLISHED["Qwen/Qwen2.5-0.5B"]
    more = {"unsloth_fixed": True, "_name_or_path": "x", "some_new_flag": False, "pad_token_id": 3}
    assert parse({**config, **more}) == parse(config)


def shrink(config: dict) -> dict:
    """The same keys with small values; absent keys stay absent."""
    config = copy.deepcopy(config)
    text = config.get("text_config", config)
    kv = {1: 1}.get(text.get("num_key_value_heads", 2), 2)
    kv = 4 if text.get("num_key_value_heads") == text.get("num_attention_heads") else kv
    small = {
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": kv,
        "vocab_size": 61,
        "max_window_layers": 7,
        "query_pre_attn_scalar": 20,
        "head_dim": 12,
        "num_local_experts": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "experts_per_token": 2,
        "moe_intermediate_size": 24,
        "n_embd": 32,
        "n_layer": 7,
        "n_head": 4,
        "no_rope_layers": (text.get("no_rope_layers") or [])[:7],
        "layer_types": (text.get("layer_types") or [])[:7],
    }
    for key in set(text) & set(small):
        text[key] = small[key]
    if text.get("sliding_window"):
        text["sliding_window"] = 5
    return config


def distinct() -> list[Any]:
    """One of the published models for each set of keys, and of keys that are null. One for each
    family by default, the others as slow tests."""
    kinds = {}
    for name, config in PUBLISHED.items():
        text = config.get("text_config", config)
        nulls = frozenset(key for key, value in text.items() if value is None)
        kinds.setdefault((config["model_type"], frozenset(text), nulls), name)
    families = {PUBLISHED[name]["model_type"]: name for name in reversed(kinds.values())}
    return [
        pytest.param(name, marks=() if name in families.values() else pytest.mark.slow)
        for name in kinds.values()
    ]


def small_model(name: str, folder: Path) -> Any:
    """A model of transformers with random weights and the published keys, written to a folder."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = shrink(PUBLISHED[name])
    body = copy.deepcopy(config)
    parsed = transformers.AutoConfig.for_model(body.pop("model_type"), **body)
    parsed = getattr(parsed, "text_config", None) or parsed
    parsed.dtype, parsed.pad_token_id = "float32", None
    parsed.vocab_size = 61  # some leave it to the default of 262,208
    (config.get("text_config") or config)["vocab_size"] = 61
    model = transformers.AutoModelForCausalLM.from_config(parsed, attn_implementation="eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return model.eval()


@pytest.mark.parametrize("name", distinct())
def test_a_small_model_with_the_same_keys_computes_what_transformers_computes(name, tmp_path):
    model = small_model(name, tmp_path)
    from tests.activations import make_fixtures

    tokens = make_fixtures.tokens(seed=3)
    expected = make_fixtures.sites(model, tokens)
    outputs = run(tmp_path, ["resid_post.*", "attn_out.6", "mlp_out.6", "final_norm"], tokens)
    for site, values in outputs.items():
        np.testing.assert_allclose(values, expected[site], **CLOSE, err_msg=site)


# One token, fewer and more than a window of 5, and more than a block of attention.
LENGTHS = (1, 4, 17, 130, 300)
LARGEST_ERROR = 1e-5
PARITY = Path(__file__).parents[4] / "docs" / "reference" / "parity.md"
EVERY_SIZE = [
    pytest.param(
        name, marks=pytest.mark.slow if name in ONE_OF_EACH.values() else pytest.mark.scale
    )
    for name in PUBLISHED
]


def site_errors(name: str, folder: Path) -> dict[str, float]:
    """The largest error of each kind of site, relative to the values that transformers has, of all
    layers and lengths: padded, as rows of one batch; and packed, one after the other in one row."""
    model = small_model(name, folder)
    from tests.activations import make_fixtures

    chance, wanted = np.random.default_rng(5), everything(folder)
    samples = [chance.integers(0, 61, length) for length in LENGTHS]
    padded = np.stack([np.pad(sample, (0, max(LENGTHS) - len(sample))) for sample in samples])
    rows = run(folder, wanted, padded)
    packed = run(
        folder,
        wanted,
        np.concatenate(samples)[None],
        segments=np.repeat(np.arange(len(LENGTHS), dtype=np.int32), LENGTHS)[None],
        positions=np.concatenate([np.arange(length) for length in LENGTHS])[None],
    )
    starts = np.cumsum([0, *LENGTHS])
    errors: dict[str, float] = {}
    for number, sample in enumerate(samples):
        expected = make_fixtures.sites(model, sample[None])
        for site in rows:
            exact, kind = expected[site][0], site.partition(".")[0]
            for found in (
                rows[site][number, : len(sample), : exact.shape[-1]],
                packed[site][0, starts[number] : starts[number + 1], : exact.shape[-1]],
            ):
                error = np.linalg.norm(found - exact) / max(np.linalg.norm(exact), 1e-30)
                errors[kind] = max(errors.get(kind, 0.0), float(error))
    return errors


@pytest.mark.parametrize("name", EVERY_SIZE)
def test_samples_of_all_lengths_are_as_close_to_transformers_as_float32_allows(name, tmp_path):
    errors = site_errors(name, tmp_path)
    assert max(errors.values()) <= LARGEST_ERROR, errors


def test_the_documentation_has_the_error_of_every_family_at_every_site():
    header, _, *lines = markdown_table(PARITY)
    assert header == ["site", *ONE_OF_EACH]
    assert [line[0] for line in lines] == list(sites.Site)
    for site, *cells in lines:
        for name, cell in zip(ONE_OF_EACH.values(), cells, strict=True):
            absent = sites.missing(sites.Site(site), parse(PUBLISHED[name]))
            assert cell == "-" if absent else float(cell) <= LARGEST_ERROR * 1e6, (name, site)


def markdown_table(page: Path) -> list[list[str]]:
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


def test_fixture_models_of_all_families_exist():
    configs = (json.loads(path.read_text()) for path in FIXTURES.glob("*/config.json"))
    kinds = {config["model_type"] for config in configs}
    assert kinds == set(architectures.FAMILIES)


def documented(title: str) -> set[str]:
    """What stands as code in the first column of a table of docs/extraction.md."""
    page = (Path(__file__).parents[4] / "docs" / "extraction.md").read_text()
    rows = page.split(f"| {title} |", 1)[1].split("\n\n", 1)[0].splitlines()
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_the_documentation_lists_every_family_and_every_site():
    assert documented("`model_type`") == {*architectures.FAMILIES, *architectures.NESTED}
    assert {name.partition(".")[0] for name in documented("site")} == set(sites.Site)

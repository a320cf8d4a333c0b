"""The decoder agrees with transformers for every model family, layer and site."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tpufleet.errors import BadInput, NotFound
from tpufleet_activations.model import architectures, attention, decoder, meshes, sites, weights
from tpufleet_activations.model.sites import Site

FIXTURES = Path(__file__).parent / "fixtures"
FAMILIES = sorted(folder.name for folder in FIXTURES.iterdir())
# float32 on both sides; what remains is the order of additions.
CLOSE = {"rtol": 2e-4, "atol": 2e-5}


def run(folder, names, tokens, *, segments=None, positions=None, dtype=jnp.float32, **options):
    """The forward pass of a model folder, as {site: [batch, length, width]} in float32."""
    arch = architectures.from_config((folder / "config.json").read_text())
    mesh = options.get("mesh") or meshes.build_mesh(jax.devices()[:1], {}, arch)
    resolved = sites.resolve(names, arch)
    params = weights.load_parameters(
        folder,
        arch,
        depth=sites.layers_needed(resolved, arch),
        dtype=dtype,
        mesh=mesh,
        final_norm=sites.final_norm_needed(resolved),
        head=sites.head_needed(resolved),
    )
    forward = decoder.Forward(
        architecture=arch, sites=resolved, dtype="f32", longest=tokens.shape[1], **options
    )
    if positions is None:
        positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    stacks = jax.jit(forward)(params, tokens, positions, segments)
    return {
        name: np.asarray(stack[number])
        for names, stack in zip(forward.output_sites, stacks, strict=True)
        for number, name in enumerate(names)
    }


def everything(folder: Path) -> list[str]:
    """Choices of every site that a model has; of some of them single heads too."""
    arch = architectures.from_folder(folder)
    special = (*sites.TOP, Site.ATTN_PATTERN)
    every = [site for site in Site if site not in special and not sites.missing(site, arch)]
    last = arch.heads - 1
    return [*every, f"attn_pattern.*.[0,{last}]", "attn_heads.*.1", "k.*.0", *TOP]


TOP = ("top_logits.5", "top_tokens.5")


# The GPU's kernel runs in JAX's interpreter: only for what it has to distinguish.
INTERPRETED = [
    ("qwen2", "varlen"),
    *(
        pytest.param(family, "varlen", marks=pytest.mark.slow)
        for family in ("mistral", "gemma2", "gemma3")
    ),
]


# Two that differ most by default, the others as slow tests.
TYPICAL = [
    pytest.param(family, marks=() if family in ("qwen2", "gemma3") else pytest.mark.slow)
    for family in FAMILIES
]
VARIANTS = ("qwen2-untied", "qwen2-windowed", "qwen2-yarn")


@pytest.mark.parametrize(
    "family, kernel",
    [
        *(
            pytest.param(family, "plain", marks=pytest.mark.slow if family in VARIANTS else ())
            for family in FAMILIES
        ),
        *(pytest.param(*each.values, "stepped", marks=each.marks) for each in TYPICAL),
        *INTERPRETED,
    ],
)
def test_every_site_of_every_layer_equals_transformers(family, kernel, monkeypatch):
    # Several spans, steps and a remainder even of sequences as short as these.
    monkeypatch.setattr(attention, "STEP", 2)
    monkeypatch.setattr(attention, "SPANS", 3)
    expected = load_file(FIXTURES / family / "expected.st")
    tokens = expected.pop("tokens")
    outputs = run(FIXTURES / family, everything(FIXTURES / family), tokens, kernel=kernel)
    assert set(outputs) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(outputs[name], values, **CLOSE, err_msg=name)


def products(jaxpr) -> list:
    """The precision of every matrix product of a program, in its loops and branches too."""
    inner = [
        part
        for equation in jaxpr.eqns
        for value in equation.params.values()
        for part in (value if isinstance(value, tuple | list) else [value])
        if hasattr(part, "jaxpr") or hasattr(part, "eqns")
    ]
    own = [e.params["precision"] for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    return own + [found for part in inner for found in products(getattr(part, "jaxpr", part))]


HIGHEST = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)


@pytest.mark.parametrize(
    "family, kernel", [*((family, "plain") for family in FAMILIES), ("qwen2", "stepped")]
)
@pytest.mark.parametrize(
    "dtype, precision", [(jnp.float32, HIGHEST), (jnp.bfloat16, None)], ids=["f32", "bf16"]
)
def test_float32_is_computed_in_full_precision_on_every_platform(family, kernel, dtype, precision):
    arch = architectures.from_folder(FIXTURES / family)
    forward = decoder.Forward(
        architecture=arch, sites=sites.resolve(["resid_post.*"], arch), kernel=kernel
    )
    shapes = weights.parameter_shapes(arch, arch.layers, final_norm=False)
    params = jax.tree.map(
        lambda shape: jnp.zeros(shape, dtype), shapes, is_leaf=lambda node: isinstance(node, tuple)
    )
    tokens = jnp.zeros((2, 24), jnp.int32)
    found = products(jax.make_jaxpr(forward)(params, tokens, tokens, None).jaxpr)
    assert len(found) >= 6 and set(found) == {precision}


@pytest.mark.slow
@pytest.mark.parametrize("family", TYPICAL)
def test_live_transformers_agree_on_fresh_weights_and_tokens(family, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from tests.activations import make_fixtures

    model, tokens = make_fixtures.build(family, seed=7), make_fixtures.tokens(seed=7)
    model.save_pretrained(tmp_path)
    expected = make_fixtures.sites(model, tokens)
    for name, values in run(tmp_path, everything(tmp_path), tokens).items():
        np.testing.assert_allclose(values, expected[name], **CLOSE, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, length", [*((family, 300) for family in FAMILIES), ("qwen2", 1500), ("gemma3", 1500)]
)
def test_long_sequences_agree_with_transformers_also_in_bf16(family, length, tmp_path):
    """bf16 is no further from float32 than that of transformers: over all sites, and in the
    residual stream. In one part of a layer, chance decides which of two roundings is closer."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.activations import make_fixtures

    model = make_fixtures.build(family, seed=7)
    model.save_pretrained(tmp_path)
    arch = architectures.from_folder(tmp_path)
    if arch.positions_end:
        length = min(length, arch.max_positions)
    tokens = np.random.default_rng(7).integers(0, make_fixtures.COMMON["vocab_size"], (2, length))
    exact = make_fixtures.sites(model, tokens)
    theirs = make_fixtures.sites(model.to(torch.bfloat16), tokens)
    ours = run(tmp_path, everything(tmp_path), tokens)
    rounded = run(tmp_path, everything(tmp_path), tokens, dtype=jnp.bfloat16)
    ratios = []
    for name in ours:
        distance = lambda other, name=name: np.linalg.norm(other[name] - exact[name])
        assert distance(ours) <= 1e-5 * np.linalg.norm(exact[name]), name
        if "experts.0" in ours or name.startswith("top_tokens"):
            continue  # another choice, of numbers that hardly differ, changes all that follow
        ratios.append(distance(rounded) / distance(theirs))
        assert ratios[-1] <= (1.05 if name.startswith("resid") else 1.5), name
    assert not ratios or np.exp(np.mean(np.log(ratios))) <= 1.0


@pytest.mark.parametrize("family", ["qwen2", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_fewer_sites_give_the_same_values_and_run_fewer_layers(family):
    folder = FIXTURES / family
    tokens = load_file(folder / "expected.st")["tokens"]
    every = run(folder, everything(folder), tokens)
    for choice in (
        ["resid_post.1"],
        ["mlp_out.0", "attn_heads.2"],
        ["resid_pre.[0,2]"],
        ["resid_pre.0"],
    ):
        for name, values in run(folder, choice, tokens).items():
            np.testing.assert_allclose(values, every[name], **CLOSE)
    arch = architectures.from_config((folder / "config.json").read_text())
    assert sites.layers_needed(["resid_post.0"], arch) == 1
    assert sites.layers_needed(["resid_pre.1"], arch) == 1
    assert sites.layers_needed(["final_norm"], arch) == 3


@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("mistral", "gemma2", "gemma3")),
    ],
)
def test_packed_sequences_do_not_attend_to_each_other(family):
    folder = FIXTURES / family
    tokens = load_file(folder / "expected.st")["tokens"]
    wanted = ["resid_post.2", "attn_pattern.2.0"]
    alone = run(folder, wanted, tokens[:1, :6])
    beside = run(
        folder,
        wanted,
        np.concatenate([tokens[1:, :7], tokens[:1, :6]], axis=1),
        segments=np.array([[0] * 7 + [1] * 6], np.int32),
        positions=np.array([[*range(7), *range(6)]], np.int32),
    )
    for name, values in alone.items():
        behind = beside[name][:, 7:, : values.shape[-1]]
        np.testing.assert_allclose(behind, values, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_blockwise_attention_of_long_sequences_gives_the_same_result(monkeypatch):
    folder = FIXTURES / "gemma2"
    tokens = np.random.default_rng(0).integers(0, 61, (1, 16))
    whole = run(folder, ["resid_post.2"], tokens, kernel="plain")["resid_post.2"]
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    blocks = run(folder, ["resid_post.2"], tokens, kernel="plain")["resid_post.2"]
    np.testing.assert_allclose(blocks, whole, **CLOSE)


@pytest.mark.parametrize("size", [pytest.param(64, marks=pytest.mark.slow), 128])
@pytest.mark.parametrize("window", [None, 50], ids=["causal", "windowed"])
def test_the_tpu_kernel_agrees_with_the_plain_one(window, size):
    chance = np.random.default_rng(3)
    query = chance.normal(size=(2, 128, 4, size)).astype(np.float32)
    key, value = (chance.normal(size=(2, 128, 2, size)).astype(np.float32) for _ in range(2))
    segments = np.repeat(np.array([[0, 1]], np.int32), 64, axis=1).repeat(2, axis=0)
    if attention.unavailable_kernels(
        platform="tpu", dtype=np.float32, head_dim=size, softcap=None, window=window
    ):
        pytest.skip(f"splash of this JAX does not support head_dim {size}; plain attention is used")
    for marks in (None, segments):
        plain, splash = (
            attention.Attention(kernel=kernel, scale=0.1, window=window)(
                query, key, value, attention.RowLayout(marks)
            )
            for kernel in ("plain", "splash")
        )
        np.testing.assert_allclose(plain, splash, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("length", [20, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("window", [None, 50], ids=["causal", "windowed"])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["uncapped", "capped"])
def test_the_cpu_kernel_agrees_with_the_plain_one(length, window, softcap):
    chance = np.random.default_rng(3)
    query = chance.normal(size=(3, length, 4, 8)).astype(np.float32)
    key, value = (chance.normal(size=(3, length, 2, 8)).astype(np.float32) for _ in range(2))
    cuts = chance.integers(1, length, (3, 1))
    segments = (np.arange(length) >= cuts).astype(np.int32)
    for marks in (None, segments):
        plain, stepped = (
            attention.Attention(kernel=kernel, scale=0.3, window=window, softcap=softcap)(
                query, key, value, attention.RowLayout(marks)
            )
            for kernel in ("plain", "stepped")
        )
        np.testing.assert_allclose(plain, stepped, rtol=2e-5, atol=2e-6)


def test_a_row_is_bitwise_independent_of_its_batch(monkeypatch):
    """So that scores are held for as many rows as fit, without the rows coming to depend on it."""
    chance = np.random.default_rng(4)
    query = chance.normal(size=(6, 200, 4, 8)).astype(np.float32)
    key, value = (chance.normal(size=(6, 200, 2, 8)).astype(np.float32) for _ in range(2))
    how = attention.Attention(kernel="stepped", scale=0.3)
    together = np.asarray(how(query, key, value))
    monkeypatch.setattr(attention, "SCORES", 2 * 4 * attention.STEP * 200)
    np.testing.assert_array_equal(how(query, key, value), together)


@pytest.mark.parametrize(
    "change, kernel",
    [
        ({"platform": "gpu"}, "cudnn"),
        ({"platform": "gpu", "dtype": jnp.float32}, "plain"),
        ({"platform": "gpu", "packed": True}, "varlen"),
        ({"platform": "gpu", "packed": True, "dtype": jnp.float32}, "plain"),
        ({"platform": "gpu", "packed": True, "unavailable": {"varlen"}}, "plain"),
        ({"platform": "gpu", "softcap": 50.0}, "varlen"),
        ({"platform": "gpu", "head_dim": 100}, "plain"),
        ({"platform": "gpu", "head_dim": 100, "packed": True}, "plain"),
        ({"platform": "gpu", "head_dim": 256}, "cudnn"),
        ({"platform": "gpu", "head_dim": 288}, "plain"),
        ({"platform": "gpu", "unavailable": {"cudnn"}}, "varlen"),
        ({"platform": "gpu", "unavailable": {"cudnn", "varlen"}}, "plain"),
        ({"platform": "tpu", "head_dim": 80}, "plain"),
        ({"platform": "tpu", "unavailable": {"splash"}}, "plain"),
        ({"platform": "tpu"}, "splash"),
        ({"platform": "tpu", "length": 100}, "plain"),
        ({"platform": "tpu", "dtype": jnp.float32}, "plain"),
        ({"platform": "cpu"}, "stepped"),
        ({"platform": "cpu", "packed": True, "softcap": 50.0, "length": 100}, "stepped"),
    ],
)
def test_attention_chooses_the_fastest_supported_kernel(change, kernel):
    fit = {"dtype": jnp.bfloat16, "head_dim": 64, "length": 256, "packed": False, "softcap": None}
    assert attention.choose_kernel(**{**fit, **change}) == kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    "platform, head_dim, failed",
    [("gpu", 64, {"cudnn"}), ("gpu", 100, set()), ("tpu", 128, set()), ("cpu", 64, set())],
)
def test_a_kernel_that_fails_on_this_machine_is_not_used(platform, head_dim, failed, caplog):
    """cuDNN needs a GPU, and here there is none; splash runs in JAX's interpreter."""
    unavailable = attention.unavailable_kernels(
        platform=platform, dtype=jnp.bfloat16, head_dim=head_dim, softcap=None, window=50
    )
    assert unavailable == failed
    assert ("cudnn attention for head_dim 64 is not used" in caplog.text) == bool(failed)


def test_a_missing_weight_is_reported_with_its_layer(tmp_path):
    shutil.copytree(FIXTURES / "qwen2", tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        run(tmp_path, ["resid_post.2"], np.zeros((1, 3), np.int32))
    # Layers above the ones asked for are not even read.
    run(tmp_path, ["resid_post.0"], np.zeros((1, 3), np.int32))


@pytest.mark.parametrize(
    "name, damage, message",
    [
        ("model.safetensors", lambda data: b"garbage, and more of it", "not a safetensors file"),
        ("model.safetensors", lambda data: b"short", "not a safetensors file"),
        ("model.safetensors", lambda data: data[:-5], "truncated"),
        ("model.safetensors", lambda data: data[:9] + b"!" + data[10:], "not a safetensors file"),
        ("config.json", lambda data: b"{", "cannot read .*config.json"),
        ("config.json", lambda data: b'{"model_type": "qwen2", "hidden_size": "x"}', "cannot read"),
        ("config.json", lambda data: b"[]", "cannot read .*config.json"),
    ],
)
def test_a_damaged_model_is_rejected_with_a_message(tmp_path, name, damage, message):
    shutil.copytree(FIXTURES / "qwen2", tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes(damage((tmp_path / name).read_bytes()))
    with pytest.raises(BadInput, match=message):
        weights.ModelCheckpoint(tmp_path)
        architectures.from_folder(tmp_path)


def test_an_unknown_weight_is_reported(tmp_path):
    shutil.copytree(FIXTURES / "llama2", tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.lora_A.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match="lora_A"):
        run(tmp_path, ["resid_post.2"], np.zeros((1, 3), np.int32))


def test_a_wrong_shape_is_reported(tmp_path):
    shutil.copytree(FIXTURES / "qwen3", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 99}))
    with pytest.raises(BadInput, match=r"expected \[99, 16\] from config\.json"):
        run(tmp_path, ["resid_post.2"], np.zeros((1, 3), np.int32))


def test_sharded_and_bf16_checkpoints_load(tmp_path):
    shutil.copytree(FIXTURES / "qwen2", tmp_path, dirs_exist_ok=True)
    tensors = {
        name: values.astype(jnp.bfloat16)
        for name, values in load_file(tmp_path / "model.safetensors").items()
    }
    (tmp_path / "model.safetensors").unlink()
    halves = sorted(tensors)[::2], sorted(tensors)[1::2]
    where = {}
    for number, names in enumerate(halves, 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, tmp_path / file)
        where.update(dict.fromkeys(names, file))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    expected = load_file(FIXTURES / "qwen2" / "expected.st")
    outputs = run(tmp_path, ["resid_post.2"], expected["tokens"])["resid_post.2"]
    error = np.linalg.norm(outputs - expected["resid_post.2"])
    assert error < 0.05 * np.linalg.norm(expected["resid_post.2"])
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(NotFound, match="model-00002"):
        run(tmp_path, ["resid_post.2"], expected["tokens"])


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_experts_are_divided_over_a_mesh(family):
    folder = FIXTURES / family
    expected = load_file(folder / "expected.st")
    arch = architectures.from_folder(folder)
    mesh = meshes.build_mesh(jax.devices()[:4], {"fsdp": 2, "tensor": 2}, arch)
    outputs = run(folder, ["mlp_out.*", "final_norm"], expected["tokens"], mesh=mesh)
    for name, values in outputs.items():
        np.testing.assert_allclose(values, expected[name], **CLOSE, err_msg=name)


@pytest.mark.parametrize("sizes", [{"data": 8}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 4}])
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_weights_are_the_same_in_any_number_of_passes(family, sizes):
    arch = architectures.from_folder(FIXTURES / family)
    mesh = meshes.build_mesh(jax.devices(), sizes, arch)
    options = {"depth": arch.layers, "dtype": jnp.float32, "mesh": mesh}
    whole = weights.load_parameters(FIXTURES / family, arch, **options)
    passes = weights.load_parameters(FIXTURES / family, arch, **options, host_bytes=1)
    jax.tree.map(np.testing.assert_array_equal, whole, passes)
    assert jax.tree.map(lambda one: one.sharding, whole) == jax.tree.map(
        lambda one: one.sharding, passes
    )


def test_every_weight_of_a_70b_passes_through_the_memory_of_the_smallest_host():
    """A v5e host with one chip has 48 GB, and 32 chips hold the model."""
    published = json.loads((Path(__file__).parent / "published_configs.json").read_text())
    arch = architectures.from_config(json.dumps(published["meta-llama/Llama-3.1-70B"]))
    once = weights.single_rules(arch, final_norm=True, head=True)
    for name, rule in {**once, **weights.layer_rules(arch, grouped=True)}.items():
        assert 2 * 4 * np.prod(rule.stored) < weights.HOST_SHARE * 48e9, name


def test_older_rope_configurations_are_equivalent():
    """Before version 5, rotary settings were written as rope_theta and rope_scaling."""
    for family, older in {
        "llama3": lambda rope: {
            "rope_theta": rope["rope_theta"],
            "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"},
        },
        "gemma3": lambda rope: {
            "rope_theta": rope["full_attention"]["rope_theta"],
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
        },
    }.items():
        config = json.loads((FIXTURES / family / "config.json").read_text())
        new = architectures.from_config(json.dumps(config))
        old = architectures.from_config(
            json.dumps({**config, **older(config.pop("rope_parameters")), "rope_parameters": None})
        )
        assert new == old


def test_a_text_decoder_inside_a_larger_model_is_found():
    text = json.loads((FIXTURES / "gemma3" / "config.json").read_text())
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    assert architectures.from_config(json.dumps(outer)).family == "gemma3_text"


def test_an_unsupported_model_type_is_reported():
    with pytest.raises(BadInput, match="mamba"):
        architectures.from_config('{"model_type": "mamba"}')


QWEN = architectures.from_config((FIXTURES / "qwen2" / "config.json").read_text())


@pytest.mark.parametrize(
    "choices, expected",
    [
        (["resid_post.1"], ("resid_post.1",)),
        (["mlp_out.*"], ("mlp_out.0", "mlp_out.1", "mlp_out.2")),
        (["resid_post.[2, 0]"], ("resid_post.0", "resid_post.2")),
        (["resid_post.0-1", "resid_post.1"], ("resid_post.0", "resid_post.1")),
        (["final_norm", "resid_pre.0"], ("resid_pre.0", "final_norm")),
        (["attn_heads.[0,1].3", "k.2.*"], ("attn_heads.0.3", "attn_heads.1.3", "k.2.0", "k.2.1")),
        (["top_tokens.10", "embed"], ("embed", "top_tokens.10")),
    ],
)
def test_site_choices_are_resolved(choices, expected):
    assert sites.resolve(choices, QWEN) == expected


@pytest.mark.parametrize(
    "choice",
    [
        *("resid_post.3", "resid_middle.1", "final_norm.2", "", "resid_post.x", "mlp_out.[]"),
        *("attn_pattern.1", "k.0.2", "mlp_out.1.0", "top_logits.0", "router_logits.0"),
    ],
)
def test_an_invalid_site_is_rejected(choice):
    with pytest.raises(BadInput):
        sites.resolve([choice], QWEN)


def test_layers_with_the_same_sites_share_one_scan():
    arch = architectures.from_config((FIXTURES / "qwen2" / "config.json").read_text())
    groups = decoder.group_layers(sites.resolve(["resid_post.[1,2]"], arch), arch)
    assert [(group.first, group.count, group.sites) for group in groups] == [
        (0, 1, ()),
        (1, 2, (sites.Point(Site.RESID_POST),)),
    ]


def test_flops_match_the_matrix_sizes():
    qwen = architectures.from_config(
        json.dumps(
            {
                "model_type": "qwen2",
                "hidden_size": 896,
                "num_hidden_layers": 24,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
                "intermediate_size": 4864,
                "vocab_size": 151936,
            }
        )
    )
    assert qwen.parameter_count() == 24 * (896 * 1152 + 896 * 896 + 3 * 896 * 4864)
    assert qwen.flops(2048) / 2048 / 2 / qwen.parameter_count() == pytest.approx(1.123, abs=0.01)

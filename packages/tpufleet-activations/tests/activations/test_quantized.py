"""Quantized checkpoints: weights are what their formats define, whoever wrote them."""

from __future__ import annotations

import json
import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.activations.test_decoder import FIXTURES
from tpufleet.errors import BadInput
from tpufleet_activations.model import architectures, meshes, weights

GROUP = 8  # inputs that share a scale


def packed(codes, axis, order=range(8)):
    """Codes of 4 bits, eight to an integer along an axis; `order` says which one is where."""
    codes = np.moveaxis(codes, axis, -1).astype(np.uint32)
    words = codes.reshape(*codes.shape[:-1], -1, 8)
    joined = np.zeros(words.shape[:-1], np.uint32)
    for place, number in enumerate(order):
        joined |= words[..., number] << np.uint32(4 * place)
    return np.moveaxis(joined, -1, axis).view(np.int32)


def four_bits(chance, shape):
    """Codes [in, out], and zero points and scales [groups, out]."""
    out, into = shape
    codes = chance.integers(0, 16, (into, out))
    zeros = chance.integers(1, 16, (into // GROUP, out))
    return codes, zeros, chance.uniform(0.01, 0.1, zeros.shape).astype(np.float16)


def gptq(chance, shape, *, version=1):
    codes, zeros, scales = four_bits(chance, shape)
    group = chance.permutation(np.arange(shape[1]) // GROUP).astype(np.int32)
    weight = (codes - zeros[group]) * np.float32(scales)[group]
    tensors = {
        "qweight": packed(codes, 0),
        "qzeros": packed(zeros - (version == 1), 1),
        "scales": scales,
        "g_idx": group,
    }
    return tensors, weight.T


def awq(chance, shape):
    codes, zeros, scales = four_bits(chance, shape)
    wide = lambda table: np.repeat(table, GROUP, axis=0)
    weight = (codes - wide(zeros)) * wide(np.float32(scales))
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": packed(codes, 1, order),
        "qzeros": packed(zeros, 1, order),
        "scales": scales,
    }
    return tensors, weight.T


def fp8(chance, shape):
    codes = chance.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    scales = chance.uniform(0.1, 1, [-(-size // GROUP) for size in shape]).astype(np.float32)
    wide = scales.repeat(GROUP, 0)[: shape[0]].repeat(GROUP, 1)[:, : shape[1]]
    return {"weight": codes, "weight_scale_inv": scales}, codes.astype(np.float32) * wide


def eight_bits(chance, shape):
    codes = chance.integers(-127, 128, shape).astype(np.int8)
    largest = chance.uniform(0.1, 1, shape[0]).astype(np.float32)
    form = np.zeros((), np.uint8)
    return (
        {"weight": codes, "SCB": largest, "weight_format": form},
        codes * largest[:, None] / 127,
    )


def nf4(chance, shape, *, nested=False):
    table = np.sort(chance.uniform(-1, 1, 16)).astype(np.float32)
    codes = chance.integers(0, 16, shape)
    flat = codes.reshape(-1, 2)
    blocks = codes.size // GROUP
    state = {"blocksize": GROUP, "shape": list(shape), "dtype": "float16"}
    tensors = {
        "weight": (flat[:, 0] << 4 | flat[:, 1]).astype(np.uint8)[:, None],
        "weight.quant_map": table,
    }
    if nested:
        inner = np.linspace(-1, 1, 256, dtype=np.float32)
        numbers = chance.integers(0, 256, blocks).astype(np.uint8)
        outer = chance.uniform(0.1, 1, -(-blocks // 16)).astype(np.float32)
        state |= {"nested_blocksize": 16, "nested_offset": 0.25}
        tensors |= {
            "weight.absmax": numbers,
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": inner,
        }
        scales = inner[numbers] * outer.repeat(16)[:blocks] + 0.25
    else:
        scales = tensors["weight.absmax"] = chance.uniform(0.1, 1, blocks).astype(np.float32)
    tensors["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(
        json.dumps(state).encode(), np.uint8
    )
    return tensors, (table[codes].reshape(-1, GROUP) * scales[:, None]).reshape(shape)


FORMATS = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "gptq-v2": (
        lambda *of: gptq(*of, version=2),
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}),
    "bitsandbytes-8": (eight_bits, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "bitsandbytes-4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "bitsandbytes-nested": (
        lambda *of: nf4(*of, nested=True),
        {"quant_method": "bitsandbytes", "bnb_4bit_use_double_quant": True},
    ),
}


def write(folder, tensors, settings=None, family="qwen2"):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((FIXTURES / family / "config.json").read_text())
    more = {"quantization_config": settings} if settings else {}
    (folder / "config.json").write_text(json.dumps({**config, **more}))


def parameters(folder):
    arch = architectures.from_folder(folder)
    mesh = meshes.build_mesh(jax.devices()[:1], {}, arch)
    return weights.load_parameters(folder, arch, depth=arch.layers, dtype=jnp.float32, mesh=mesh)


# Weights of GPT-2 are [input, output], and are transposed before they are quantized.
@pytest.mark.parametrize(
    "form, family",
    [*((form, "qwen2") for form in FORMATS), ("bitsandbytes-4", "gpt2"), ("gptq", "gpt2")],
)
def test_a_quantized_model_has_the_weights_that_its_format_defines(form, family, tmp_path):
    quantize, settings = FORMATS[form]
    chance = np.random.default_rng(0)
    plain = load_file(FIXTURES / family / "model.safetensors")
    stored = dict(plain)
    turn = np.transpose if family == "gpt2" else np.asarray
    for name in sorted(name for name in plain if re.search(r"(_proj|c_\w+)\.weight", name)):
        base = name.removesuffix("weight")
        tensors, values = quantize(chance, turn(stored.pop(name)).shape)
        plain[name] = np.ascontiguousarray(turn(values), np.float32)
        stored |= {base + part: np.ascontiguousarray(value) for part, value in tensors.items()}
    write(tmp_path / "quantized", stored, settings, family)
    write(tmp_path / "plain", plain, family=family)
    ours, expected = parameters(tmp_path / "quantized"), parameters(tmp_path / "plain")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, expected)


def test_mxfp4_of_gpt_oss_is_what_transformers_reads(tmp_path):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    torch = pytest.importorskip("torch")
    chance = np.random.default_rng(0)
    blocks = chance.integers(0, 256, (3, 10, 2, 16)).astype(np.uint8)
    scales = chance.integers(110, 130, (3, 10, 2)).astype(np.uint8)
    name = "layers.0.mlp.experts.gate_up_proj"
    write(
        tmp_path / "model",
        {
            "model.embed_tokens.weight": np.zeros((2, 2), np.float32),
            f"model.{name}_blocks": blocks,
            f"model.{name}_scales": scales,
        },
    )
    ours = np.empty((3, 64, 10), np.float32)
    weights.ModelCheckpoint(tmp_path / "model").read_into(name, ours.shape, ours)
    theirs = mxfp4.convert_moe_packed_tensors(
        torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
    )
    np.testing.assert_array_equal(ours, theirs.numpy())


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"quant_method": "compressed-tensors"}, "quant_method 'compressed-tensors'"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3 is not one of 2, 4, 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
    ],
)
def test_a_format_that_is_not_supported_is_an_error_that_names_it(settings, message, tmp_path):
    write(tmp_path / "model", {"x": np.zeros(1, np.float32)}, settings)
    with pytest.raises(BadInput, match=message):
        architectures.from_folder(tmp_path / "model")


def test_a_quantized_weight_of_another_shape_is_an_error(tmp_path):
    shutil.copytree(FIXTURES / "qwen2", tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    tensors.pop(f"{name}.weight")
    codes, _ = eight_bits(np.random.default_rng(0), (24, 8))
    save_file(
        tensors | {f"{name}.{part}": value for part, value in codes.items()},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(BadInput, match=r"up_proj.* \[24, 8\], expected \[24, 16\]"):
        parameters(tmp_path)

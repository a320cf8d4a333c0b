"""Device-specific kernels and host memory: selection and correctness."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.activations.test_decoder import QWEN
from tpufleet.errors import BadInput
from tpufleet_activations.model import gated_mlp, host_memory, kernel_choice, meshes


@pytest.fixture
def mesh():
    return lambda sizes: meshes.build_mesh(jax.devices(), sizes, QWEN)


def numbers(*shape: int, seed: int = 0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_gate_is_applied_to_one_half_of_the_product(activation):
    values, stack, bias = numbers(2, 3, 8), numbers(3, 8, 2, 5, seed=1), numbers(2, 5, seed=2)
    gate, up = (np.asarray(values @ stack[1, :, n] + bias[n], np.float64) for n in range(2))
    activated = {
        "silu": gate / (1 + np.exp(-gate)),
        "gelu_tanh": gate / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3))),
    }
    result = gated_mlp.gate_and_up(values, stack, 1, bias, activation=activation)
    np.testing.assert_allclose(result, activated[activation] * up, rtol=1e-4, atol=1e-4)


def test_unsupported_shapes_fall_back_to_the_plain_kernel():
    values = numbers(1, 7, 64, dtype=jnp.bfloat16)
    stack = numbers(2, 64, 2, 128, dtype=jnp.bfloat16)
    assert not gated_mlp.supports_shape(7, 64, 128)
    result = gated_mlp.gate_and_up(values, stack, 1, activation="silu", kernel="hopper")
    np.testing.assert_array_equal(
        result, gated_mlp.gate_and_up(values, stack, 1, activation="silu")
    )


HOPPER = SimpleNamespace(compute_capability="9.0")


@pytest.mark.parametrize(
    "change",
    [
        {"device": SimpleNamespace(compute_capability="8.0")},
        {"device": SimpleNamespace()},
        {"dtype": jnp.float32},
        {"biased": True},
        {"sizes": {"tensor": 2}},
        {"sizes": {"fsdp": 2}},
    ],
)
def test_the_hopper_kernel_is_chosen_only_where_supported(change, mesh, monkeypatch):
    monkeypatch.setattr(gated_mlp, "kernel_works", lambda *_: True)
    fit = {"device": HOPPER, "dtype": jnp.bfloat16, "activation": "silu", "biased": False}
    fit["width"] = 896
    assert gated_mlp.choose_kernel(**fit, mesh=mesh({})) == "hopper"
    asked = {**fit, **change}
    sizes = asked.pop("sizes", {})
    assert gated_mlp.choose_kernel(**asked, mesh=mesh(sizes)) == "plain"


def test_tiles_are_as_deep_as_the_width_allows():
    assert gated_mlp.choose_tiling(896) == gated_mlp.TILING
    assert gated_mlp.choose_tiling(576) == gated_mlp.SHALLOW
    assert gated_mlp.supports_shape(512, 896, 4864) and gated_mlp.supports_shape(512, 576, 1536)
    assert not gated_mlp.supports_shape(512, 80, 1536)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [256, 192])
def test_the_kernel_can_be_compiled_without_a_gpu(activation, width):
    """As far as JAX compiles it; the rest is up to CUDA."""
    kernel = jax.jit(partial(gated_mlp.gate_and_up, activation=activation, kernel="hopper"))
    arguments = (
        jax.ShapeDtypeStruct((1, 512, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((28, width, 2, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    text = kernel.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def test_a_kernel_that_fails_its_self_test_is_not_used():
    gated_mlp.kernel_works.cache_clear()
    assert gated_mlp.kernel_works("silu") is False  # there is no GPU among the devices of the tests
    gated_mlp.kernel_works.cache_clear()


@pytest.mark.parametrize(
    "activation, tiling",
    [
        ("silu", gated_mlp.TILING),
        ("gelu_tanh", gated_mlp.TILING),
        ("silu", replace(gated_mlp.SHALLOW, stages=2)),
    ],
)
def test_the_kernel_computes_the_gate_of_one_layer(activation, tiling):
    """Its every copy, barrier and product is played by JAX's interpreter for such kernels."""
    pytest.importorskip("absl", reason="JAX's GPU kernels need absl")
    gpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    if not hasattr(gpu, "InterpretGPUParams"):
        pytest.skip("this JAX does not interpret GPU kernels")
    values, stack = numbers(512, 128, dtype=jnp.bfloat16), numbers(3, 128, 2, 256, seed=1) / 8
    stack = stack.astype(jnp.bfloat16)
    result = gated_mlp.hopper_kernel(
        values,
        stack.reshape(3 * 128, 512),
        1,
        tiling=tiling,
        activation=activation,
        grid=(1,),
        interpret=gpu.InterpretGPUParams(),
    )
    plain = gated_mlp.gate_and_up(values[None], stack, 1, activation=activation)[0]
    gap = np.linalg.norm(np.float32(result) - np.float32(plain))
    assert gap < 0.01 * np.linalg.norm(np.float32(plain))


def device(platform: str, *kinds: str):
    memories = [SimpleNamespace(kind=kind) for kind in kinds]
    return SimpleNamespace(
        platform=platform, device_kind=platform, addressable_memories=lambda: memories
    )


@pytest.mark.parametrize(
    "memory, where, kind",
    [
        ("auto", device("gpu", "device", "pinned_host"), "pinned_host"),
        ("auto", device("gpu", "device"), None),
        ("auto", device("tpu", "device", "pinned_host"), None),
        ("pinned", device("tpu", "device", "pinned_host"), "pinned_host"),
        ("plain", device("gpu", "device", "pinned_host"), None),
    ],
)
def test_page_locked_memory_is_used_on_gpus(memory, where, kind):
    mesh = SimpleNamespace(devices=np.array([where]))
    assert host_memory.memory_kind(mesh, memory) == kind


@pytest.mark.parametrize("memory, message", [("pinned", "no page-locked"), ("warm", "plain")])
def test_unavailable_host_memory_is_rejected(memory, message):
    mesh = SimpleNamespace(devices=np.array([device("gpu", "device")]))
    with pytest.raises(BadInput, match=message):
        host_memory.memory_kind(mesh, memory)


def test_a_view_of_host_memory_outlives_the_array_that_it_is_of():
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    values = np.arange(24, dtype=jnp.bfloat16).reshape(2, 3, 4)
    array = jax.device_put(values, place)
    alive = weakref.ref(array)
    view = host_memory.view(array)
    row = view[1, 2]
    assert not view.flags.writeable and view.__array_interface__["data"][0] == (
        array.unsafe_buffer_pointer()
    )
    np.testing.assert_array_equal(view, values)
    del array, view
    gc.collect()
    np.testing.assert_array_equal(row, values[1, 2])
    assert alive() is not None
    del row
    gc.collect()
    assert alive() is None, "the memory is used again"
    empty = host_memory.view(jax.device_put(values[:0], place))
    assert empty.shape == (0, 3, 4) and empty.dtype == values.dtype


def test_memory_is_allocated_ahead_where_it_is_page_locked(monkeypatch):
    mesh = meshes.build_mesh(jax.devices()[:1], {}, QWEN)
    host_memory.reserve(mesh, "pinned", [4096, 1024])
    host_memory.reserve(mesh, "auto", [1 << 60])  # not on a CPU
    monkeypatch.setattr(jax, "device_put", _no_memory)
    host_memory.reserve(mesh, "pinned", [4096])  # an advantage, not a need


def _no_memory(*_):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of host memory")


def test_options_that_the_compiler_does_not_know_are_left_out(mesh, monkeypatch, caplog):
    one = SimpleNamespace(size=1, devices=np.array([device("gpu")]))
    two = SimpleNamespace(size=2, devices=one.devices)
    options = lambda where, dtype: kernel_choice.compiler_options(where, dtype, None)
    assert options(one, jnp.bfloat16) == kernel_choice.IN_PLACE
    assert options(one, jnp.float32) == kernel_choice.IN_PLACE | kernel_choice.NO_TRITON
    assert options(two, jnp.bfloat16) == {}
    assert options(two, jnp.float32) == kernel_choice.NO_TRITON
    assert options(mesh({}), jnp.float32) == {}
    monkeypatch.setattr(kernel_choice, "IN_PLACE", {"xla_gpu_no_such_option": True})
    assert options(one, jnp.bfloat16) == {}
    assert "xla_gpu_no_such_option" in caplog.text

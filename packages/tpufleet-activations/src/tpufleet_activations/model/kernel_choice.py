"""The kernels of attention and the MLP, and the options of the compiler, for given devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpufleet_activations.model import attention, gated_mlp, host_memory
from tpufleet_activations.model.architectures import Architecture
from tpufleet_activations.model.program_cache import ProgramCache, warn_unused

COMPUTE_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}
# Products read the weights of a layer where they are in the stack of all layers; XLA would copy
# them first.
IN_PLACE = {"xla_gpu_enable_dynamic_slice_fusion": True}
# For full float32 products, XLA would try kernels that take minutes to compile.
NO_TRITON = {"xla_gpu_enable_triton_gemm": False}


def choose_kernels(
    arch: Architecture,
    compute: str,
    mesh: Mesh,
    *,
    packed: bool,
    cache: ProgramCache | None,
) -> tuple[frozenset[str], str]:
    """The kernels of attention that do not work on these devices, and the kernel of the MLP. What
    works is remembered; what fails is tried again by the next run."""
    device = mesh.devices.flat[0]
    attends = {
        "platform": device.platform,
        "dtype": COMPUTE_DTYPES[compute],
        "head_dim": arch.head_dim,
        "softcap": arch.softcap,
        "window": arch.window,
        "packed": packed,
        "sinks": arch.sinks,
    }
    gates = {
        "dtype": COMPUTE_DTYPES[compute],
        "activation": arch.activation,
        "biased": arch.mlp_bias or arch.expert_bias or not arch.gated,
        "width": arch.hidden,
        "experts": bool(arch.experts),
    }
    find_attention = lambda: sorted(attention.unavailable_kernels(**attends))
    find_gate = lambda: gated_mlp.choose_kernel(device=device, mesh=mesh, **gates)
    if cache is None:
        return frozenset(find_attention()), find_gate()
    described = [repr({**kind, "dtype": compute}) for kind in (attends, gates)]
    unavailable = cache.finding(
        ("attention", described[0]), find_attention, keep=lambda failed: not failed
    )
    shape = list(mesh.shape.items())
    gate = cache.finding(
        ("gate", described[1], shape), find_gate, keep=lambda kernel: kernel != "plain"
    )
    return frozenset(unavailable), gate


def compiler_options(mesh: Mesh, dtype: Any, cache: ProgramCache | None) -> dict[str, bool]:
    """Options of XLA for parameters of this type, if this version knows them. Those that change
    how memory is used are for one GPU, where they were measured."""
    if mesh.devices.flat[0].platform not in host_memory.GPUS:
        return {}
    options = IN_PLACE if mesh.size == 1 else {}
    if jnp.dtype(dtype) == jnp.float32:
        options = {**options, **NO_TRITON}
    known = lambda: options_known(options)
    parts = ("compiler options", sorted(options))
    is_known = known() if cache is None else cache.finding(parts, known, keep=bool)
    return options if is_known else {}


def options_known(options: dict[str, bool]) -> bool:
    try:
        jax.jit(lambda: jnp.zeros(()), compiler_options=options)()
    except jax.errors.JaxRuntimeError as error:
        warn_unused(f"one of the compiler options {', '.join(options)}", error)
        return False
    return True

"""The kernels of attention and the MLP that work on given devices."""

from __future__ import annotations

import jax.numpy as jnp
from jax.sharding import Mesh

from tpufleet.workloads.activations.model import attention, gated_mlp
from tpufleet.workloads.activations.model.architectures import Architecture
from tpufleet.workloads.activations.model.program_cache import ProgramCache

COMPUTE_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}


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
    }
    gates = {
        "dtype": COMPUTE_DTYPES[compute],
        "activation": arch.activation,
        "biased": arch.mlp_bias,
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

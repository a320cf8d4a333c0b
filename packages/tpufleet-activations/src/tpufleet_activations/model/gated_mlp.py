"""The first half of a gated MLP, act(x @ gate) * (x @ up), fused on Hopper GPUs.

The fused kernel keeps both products, which are twice as wide as the result, out of global memory.
Elsewhere it is left to the compiler.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from tpufleet_activations.model import meshes
from tpufleet_activations.model.biased_product import biased_product

KERNELS = ("plain", "hopper")
# The tanh approximation of GELU is x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3))).
GELU_LINEAR = -2 * (2 / math.pi) ** 0.5
GELU_CUBIC = 0.044715 * GELU_LINEAR
HALF = 2  # bytes per element of the dtypes that the kernel supports


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """Tile sizes of the Hopper kernel, chosen by measurement."""

    rows: int = 64  # per warpgroup, of which there are two
    columns: int = 128  # of the gate, and as many of the up projection
    depth: int = 128
    stages: int = 2  # tiles in flight to shared memory
    band: int = 8  # adjacent tiles that share the L2 cache
    stored: int = 128  # columns written at a time

    @property
    def block(self) -> int:
        """Rows computed by a cluster of two thread blocks."""
        return 4 * self.rows


TILING = Tiling()
SHALLOW = Tiling(depth=64, stages=4, band=16, stored=64)  # the same shared memory


def choose_tiling(width: int) -> Tiling:
    """Deep tiles have fewer steps, and so draw less power, which is what limits the chip."""
    return TILING if width % TILING.depth == 0 else SHALLOW


def gated(
    values: Any,
    stack: Any,
    layer: Any,
    bias: Any = None,
    *,
    activation: str,
    kernel: str = "plain",
    mesh: Mesh | None = None,
) -> Any:
    """values [batch, length, width] and a layer of the stack [layers, width, 2, hidden] give
    [batch, length, hidden]."""
    batch, length, width = values.shape
    if kernel == "hopper" and supports_shape(batch * length, width, stack.shape[-1], mesh):
        work = functools.partial(_hopper_rows, activation=activation)
        if mesh is None or mesh.size == 1:
            return work(values, stack, layer)
        spread = PartitionSpec(meshes.BATCH_AXES, None, None)
        return jax.shard_map(
            work,
            mesh=mesh,
            in_specs=(spread, PartitionSpec(), PartitionSpec()),
            out_specs=spread,
            check_vma=False,
        )(values, stack, layer)
    weight = lax.dynamic_index_in_dim(stack, layer, keepdims=False)
    pair = biased_product("bsd,dcf->bscf", values, weight, bias)
    return activate(pair[:, :, 0], activation) * pair[:, :, 1]


def activate(values: Any, activation: str) -> Any:
    if activation == "silu":
        return jax.nn.silu(values)
    return jax.nn.gelu(values, approximate=True)


def choose_kernel(
    *,
    device: Any,
    dtype: Any,
    activation: str,
    biased: bool,
    width: int,
    mesh: Mesh | None = None,
) -> str:
    """The kernel for this device and model; unsupported shapes fall back to the plain one."""
    unsharded = mesh is None or mesh.shape["fsdp"] == mesh.shape["tensor"] == 1
    is_hopper = getattr(device, "compute_capability", "") == "9.0"
    supported = not biased and jnp.dtype(dtype) == jnp.bfloat16
    if is_hopper and unsharded and supported and kernel_works(activation, choose_tiling(width)):
        return "hopper"
    return "plain"


def supports_shape(rows: int, width: int, hidden: int, mesh: Mesh | None = None) -> bool:
    parts, tiling = 1 if mesh is None else meshes.batch_shards(mesh), choose_tiling(width)
    return (
        rows % (tiling.block * parts) == 0
        and width % tiling.depth == 0
        and hidden % tiling.columns == 0
    )


@functools.cache
def kernel_works(activation: str, tiling: Tiling = TILING) -> bool:
    """Whether the kernel compiles here and agrees with NumPy on a small example, which compiles
    nothing else. It uses an experimental JAX API that may change."""
    random = np.random.default_rng(0)
    width = 3 * tiling.depth
    values = random.standard_normal((1, 2 * tiling.block, width)).astype(jnp.bfloat16)
    stack = random.standard_normal((3, width, 2, 2 * tiling.columns)) / 16
    stack = stack.astype(jnp.bfloat16)
    try:
        kernel = jax.jit(functools.partial(gated, activation=activation, kernel="hopper"))
        ours = np.float32(kernel(values, stack, 1))
        pair = np.einsum("bsd,dcf->bscf", *map(np.float32, (values, stack[1])))
        gate, up = np.moveaxis(pair, 2, 0)
        slope = -gate if activation == "silu" else (GELU_LINEAR + GELU_CUBIC * gate**2) * gate
        theirs = gate * up / (1 + np.exp(slope))
        return bool(np.linalg.norm(ours - theirs) <= 0.01 * np.linalg.norm(theirs))
    except Exception as error:
        # Any error: the plain kernel gives the same results, only slower.
        logging.getLogger(__name__).warning("fused MLP kernel disabled: %s", error)
        return False


def _hopper_rows(values: Any, stack: Any, layer: Any, *, activation: str) -> Any:
    batch, length, width = values.shape
    flat = hopper_kernel(
        values.reshape(batch * length, width),
        stack.reshape(stack.shape[0] * width, -1),
        layer,
        tiling=choose_tiling(width),
        activation=activation,
    )
    return flat.reshape(batch, length, -1)


def hopper_kernel(
    values: Any,
    weights: Any,
    layer: Any,
    *,
    tiling: Tiling = TILING,
    activation: str = "silu",
    **overrides: Any,
) -> Any:
    """activation(values @ gate) * (values @ up) of [rows, width] and one of the layers of
    [layers * width, gate | up], which would have to be copied to be an array of its own.

    Two thread blocks share each tile of the weights. In a block, two warpgroups multiply 64 rows
    each with a tile of the gate and the same columns of the up projection, while a third warpgroup
    prefetches tiles.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    rows, width = values.shape
    hidden = weights.shape[1] // 2
    high, wide = 2 * tiling.rows, tiling.columns
    grid = (rows // tiling.block, hidden // wide)

    def tiles(columns: int) -> tuple[Any, ...]:
        swizzle = gpu.find_swizzle(columns * HALF * 8)
        return gpu.TilingTransform((8, swizzle // HALF)), gpu.SwizzleTransform(swizzle)

    def pipeline(body: Any, context: Any) -> Any:
        tile = gpu.BlockSpec(
            (tiling.depth, wide),
            lambda step: (step, 0),
            transforms=tiles(wide),
            memory_space=gpu.SMEM,
            collective_axes=("pair",),
        )
        own_rows = gpu.BlockSpec(
            (high, tiling.depth),
            lambda step: (0, step),
            transforms=tiles(tiling.depth),
            memory_space=gpu.SMEM,
        )
        return gpu.emit_pipeline_warp_specialized(
            body,
            grid=(width // tiling.depth,),
            memory_registers=40,
            in_specs=[own_rows, tile, tile],
            wg_axis="group",
            num_compute_wgs=2,
            max_concurrent_steps=tiling.stages,
            compute_context=context,
        )

    def power(gate: Any) -> Any:
        """exp(-2 u), where both activations are x / (1 + exp(-2 u))."""
        if activation == "silu":
            return jnp.exp(-gate)
        return jnp.exp((GELU_LINEAR + GELU_CUBIC * gate * gate) * gate)

    def kernel(values: Any, weights: Any, layer: Any, out: Any) -> None:
        own = pl.ds(layer[0] * width, width)

        def no_op(*_: Any, **__: Any) -> None: ...

        slots = min(2, wide // tiling.stored)

        @functools.partial(
            pl.run_scoped,
            buffers=pipeline(no_op, no_op).get_allocations(values, weights, weights),
            staging=gpu.SMEM(
                (2, slots, tiling.rows, tiling.stored), out.dtype, transforms=tiles(tiling.stored)
            ),
            collective_axes="group",
        )
        def _scope(buffers: Any, staging: Any) -> None:
            group, pair = lax.axis_index("group"), lax.axis_index("pair")
            share = pl.ds(group * tiling.rows, tiling.rows)

            @gpu.nd_loop((grid[0] * grid[1],), collective_axes="blocks")
            def _tiles(loop: Any) -> None:
                (number,) = loop.index
                row, column = gpu.planar_snake(number, grid, 0, tiling.band)
                below = pl.ds((2 * row + pair) * high, high)
                beside = pl.ds(column * wide, wide)
                rest = pl.ds(hidden + column * wide, wide)

                def context(run: Any) -> None:
                    sums = gpu.ACC((tiling.rows, wide), jnp.float32)

                    @functools.partial(pl.run_scoped, gate=sums, up=sums)
                    def _sums(gate: Any, up: Any) -> None:
                        run((gate, up))
                        left, right = gate[...], up[...]
                        kept = (left * right / (1.0 + power(left))).astype(out.dtype)
                        for part in range(wide // tiling.stored):
                            span = slice(part * tiling.stored, (part + 1) * tiling.stored)
                            slot = staging.at[group, part % slots]
                            gpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                            slot[...] = kept[:, span]
                            gpu.commit_smem()
                            gpu.copy_smem_to_gmem(slot, out.at[below, beside].at[share, span])

                def multiply(_: Any, values: Any, gate: Any, up: Any, sums: Any) -> Any:
                    gpu.wgmma(sums[0], values.at[share], gate)
                    gpu.wgmma(sums[1], values.at[share], up)
                    gpu.wgmma_wait(0)
                    return sums

                pipeline(multiply, context)(
                    values.at[below, :],
                    weights.at[own, beside],
                    weights.at[own, rest],
                    allocations=buffers,
                )

        gpu.wait_smem_to_gmem(0, wait_read_only=True)

    options = {"grid": (_multiprocessors() // 2,), **overrides}
    return gpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, hidden), values.dtype),
        grid_names=("blocks",),
        cluster=(2,),
        cluster_names=("pair",),
        num_threads=3,
        thread_name="group",
        compiler_params=gpu.CompilerParams(
            lowering_semantics=gpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
        **options,
    )(values, weights, jnp.asarray(layer, jnp.int32).reshape(1))


def _multiprocessors() -> int:
    """Streaming multiprocessors of the device; the H100 and the H200 have 132."""
    return getattr(jax.local_devices()[0], "core_count", 132)

"""The first half of an MLP, act(x @ w_gate) * (x @ w_up), fused on Hopper GPUs. The down projection
follows in `decoder`, that of experts in `experts`.

The fused kernel keeps both products, which are twice as wide as the result, out of global memory.
Elsewhere it is left to the compiler.
"""

from __future__ import annotations

import functools
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
from tpufleet_activations.model.program_cache import warn_unused

KERNELS = ("plain", "hopper")
# The tanh approximation of GELU is x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3))).
GELU_LINEAR = -2 * (2 / math.pi) ** 0.5
GELU_CUBIC = 0.044715 * GELU_LINEAR
CLAMPED_SLOPE = 1.702  # of gpt-oss
FUSED = ("silu", "gelu_tanh")  # activations that the Hopper kernel has
ITEMSIZE = 2  # of the dtypes that the kernel supports


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """Tile sizes of the Hopper kernel, chosen by measurement: x is [m, k], each weight [k, n]."""

    tile_m: int = 64  # per warpgroup, of which there are two
    tile_n: int = 128  # of the gate, and as many of the up projection
    tile_k: int = 128
    stages: int = 2  # tiles in flight to shared memory
    grid_tile_width: int = 8  # adjacent tiles that share the L2 cache
    epilogue_tile_n: int = 128  # columns written at a time

    @property
    def cluster_tile_m(self) -> int:
        """Rows computed by a cluster of two thread blocks."""
        return 4 * self.tile_m


TILING = Tiling()
# The same shared memory.
SHALLOW = Tiling(tile_k=64, stages=4, grid_tile_width=16, epilogue_tile_n=64)


def choose_tiling(width: int) -> Tiling:
    """Deep tiles have fewer steps, and so draw less power, which is what limits the chip."""
    return TILING if width % TILING.tile_k == 0 else SHALLOW


def gate_and_up(
    x: Any,
    w_gate_up: Any,
    layer: Any,
    bias: Any = None,
    *,
    activation: str,
    kernel: str = "plain",
    mesh: Mesh | None = None,
) -> Any:
    """x [batch, length, width] and a layer of w_gate_up [layers, width, 2, intermediate] give
    [batch, length, intermediate]; without a gate it is [layers, width, 1, intermediate]."""
    batch, length, width = x.shape
    if kernel == "hopper" and supports_shape(batch * length, width, w_gate_up.shape[-1], mesh):
        run = functools.partial(_hopper, activation=activation)
        rows = PartitionSpec(meshes.BATCH_AXES, None, None)
        specs = (rows, PartitionSpec(), PartitionSpec())
        return meshes.run_sharded(run, mesh, specs, rows)(x, w_gate_up, layer)
    return combine(project(x, w_gate_up, layer, bias), activation)


def project(x: Any, w_gate_up: Any, layer: Any, bias: Any = None) -> Any:
    """Both products, before the activation: [batch, length, 2, intermediate]."""
    weight = lax.dynamic_index_in_dim(w_gate_up, layer, keepdims=False)
    return biased_product("bsd,dcf->bscf", x, weight, bias)


def combine(pair: Any, activation: str, clamp: float = 0.0) -> Any:
    """The hidden units of products [..., 2, intermediate], or [..., 1, intermediate], rounded
    once."""
    gate, *up = jnp.unstack(pair.astype(jnp.float32), axis=-2)
    if activation == "swiglu_clamped":
        gate, up = jnp.minimum(gate, clamp), [jnp.clip(up[0], -clamp, clamp) + 1]
        hidden = gate * jax.nn.sigmoid(gate * CLAMPED_SLOPE)
    else:
        hidden = activate(gate, activation)
    return (hidden * up[0] if up else hidden).astype(pair.dtype)


def activate(gate: Any, activation: str) -> Any:
    if activation == "silu":
        return jax.nn.silu(gate)
    return jax.nn.gelu(gate, approximate=activation == "gelu_tanh")


def choose_kernel(
    *,
    device: Any,
    dtype: Any,
    activation: str,
    biased: bool,
    width: int,
    experts: bool = False,
    mesh: Mesh | None = None,
) -> str:
    """The kernel for this device and model; unsupported shapes fall back to the plain one."""
    unsharded = mesh is None or mesh.shape["fsdp"] == mesh.shape["tensor"] == 1
    is_hopper = getattr(device, "compute_capability", "") == "9.0"
    supported = not biased and activation in FUSED and jnp.dtype(dtype) == jnp.bfloat16
    if not (is_hopper and unsharded and supported):
        return "plain"
    works = (
        grouped_kernel_works(activation)
        if experts
        else kernel_works(activation, choose_tiling(width))
    )
    return "hopper" if works else "plain"


def supports_shape(m: int, k: int, n: int, mesh: Mesh | None = None) -> bool:
    shards, tiling = 1 if mesh is None else meshes.batch_shards(mesh), choose_tiling(k)
    return (
        m % (tiling.cluster_tile_m * shards) == 0
        and k % tiling.tile_k == 0
        and n % tiling.tile_n == 0
    )


def supports_experts(width: int, inner: int) -> bool:
    """Whether the products of experts of these sizes have whole tiles, up and down."""
    side = 2 * TILING.tile_n
    return width % side == 0 and inner % TILING.tile_n == 0 and inner % TILING.tile_k == 0


@functools.cache
def kernel_works(activation: str, tiling: Tiling = TILING) -> bool:
    """Whether the kernel compiles here and agrees with NumPy on a small example, which compiles
    nothing else. It uses an experimental JAX API that may change."""
    random = np.random.default_rng(0)
    width = 3 * tiling.tile_k
    x = random.standard_normal((1, 2 * tiling.cluster_tile_m, width)).astype(jnp.bfloat16)
    w_gate_up = random.standard_normal((3, width, 2, 2 * tiling.tile_n)) / 16
    w_gate_up = w_gate_up.astype(jnp.bfloat16)
    try:
        kernel = jax.jit(functools.partial(gate_and_up, activation=activation, kernel="hopper"))
        ours = np.asarray(kernel(x, w_gate_up, 1), np.float32)
        pair = np.einsum("bsd,dcf->bscf", *map(np.float32, (x, w_gate_up[1])))
        gate, up = np.moveaxis(pair, 2, 0)
        slope = -gate if activation == "silu" else (GELU_LINEAR + GELU_CUBIC * gate**2) * gate
        theirs = gate * up / (1 + np.exp(slope))
        return _is_close(ours, theirs)
    except Exception as error:
        # Any error: the plain kernel gives the same results, only slower.
        warn_unused("the fused MLP kernel", error)
        return False


@functools.cache
def grouped_kernel_works(activation: str) -> bool:
    """The same of the kernel for experts: two tiles with other weights, and one not in use."""
    random = np.random.default_rng(0)
    k, n, rows = 2 * TILING.tile_k, 2 * TILING.tile_n, TILING.cluster_tile_m
    x = random.standard_normal((3 * rows, k)).astype(jnp.bfloat16)
    w = (random.standard_normal((3, k, n)) / 16).astype(jnp.bfloat16)
    index = np.array([2, 1, 0, 2], np.int32)
    wide = lambda values: np.asarray(values, np.float32)

    def run(kind: str | None) -> np.ndarray:
        kernel = jax.jit(functools.partial(hopper_kernel, activation=kind, grouped=True))
        return wide(kernel(x, w.reshape(3 * k, n), index))[: 2 * rows]

    try:
        product = np.concatenate(
            [wide(x[:rows]) @ wide(w[2]), wide(x[rows : 2 * rows]) @ wide(w[1])]
        )
        gate, up = np.split(product, 2, axis=1)
        slope = -gate if activation == "silu" else (GELU_LINEAR + GELU_CUBIC * gate**2) * gate
        gated = gate * up / (1 + np.exp(slope))
        return _is_close(run(None), product) and _is_close(run(activation), gated)
    except Exception as error:
        # Any error: the plain products give the same results, only slower.
        warn_unused("the fused kernel for experts", error)
        return False


def _is_close(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return bool(np.linalg.norm(ours - theirs) <= 0.01 * np.linalg.norm(theirs))


def _hopper(x: Any, w_gate_up: Any, layer: Any, *, activation: str) -> Any:
    batch, length, width = x.shape
    flat = hopper_kernel(
        x.reshape(batch * length, width),
        w_gate_up.reshape(w_gate_up.shape[0] * width, -1),
        layer,
        tiling=choose_tiling(width),
        activation=activation,
    )
    return flat.reshape(batch, length, -1)


def hopper_kernel(
    x: Any,
    w_gate_up: Any,
    layer: Any,
    *,
    tiling: Tiling = TILING,
    activation: str | None = None,
    grouped: bool = False,
    **overrides: Any,
) -> Any:
    """activation(x @ w_gate) * (x @ w_up) of x [m, k] and one of the layers of w_gate_up
    [layers * k, gate | up], which would have to be copied to be an array of its own. Without an
    activation, x @ w.

    `grouped`: `layer` holds the number of the weights for each `cluster_tile_m` rows, and last how
    many of these tiles are used; the others are left as they are.

    Two thread blocks of a cluster share each tile of the weights. In a block, two warpgroups
    multiply `tile_m` rows each with a tile of the gate and the same columns of the up projection,
    while a third warpgroup prefetches tiles.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    m, k = x.shape
    tile_m, tile_n, tile_k = tiling.tile_m, tiling.tile_n, tiling.tile_k
    epilogue_tile_n = tiling.epilogue_tile_n
    block_m = 2 * tile_m
    # A tile of the weights has two parts: of gate and up projection, or adjacent ones.
    gated = activation is not None
    n = w_gate_up.shape[1] // (2 if gated else 1)
    out_tile_n = tile_n if gated else 2 * tile_n
    tiles = m // tiling.cluster_tile_m

    def transforms(columns: int) -> tuple[Any, ...]:
        swizzle = plgpu.find_swizzle(columns * ITEMSIZE * 8)
        return plgpu.TilingTransform((8, swizzle // ITEMSIZE)), plgpu.SwizzleTransform(swizzle)

    def pipeline(body: Any, context: Any) -> Any:
        w_spec = plgpu.BlockSpec(
            (tile_k, tile_n),
            lambda k_step: (k_step, 0),
            transforms=transforms(tile_n),
            memory_space=plgpu.SMEM,
            collective_axes=("cluster",),
        )
        x_spec = plgpu.BlockSpec(
            (block_m, tile_k),
            lambda k_step: (0, k_step),
            transforms=transforms(tile_k),
            memory_space=plgpu.SMEM,
        )
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(k // tile_k,),
            memory_registers=40,
            in_specs=[x_spec, w_spec, w_spec],
            wg_axis="wg",
            num_compute_wgs=2,
            max_concurrent_steps=tiling.stages,
            compute_context=context,
        )

    def exp_slope(gate: Any) -> Any:
        """exp(-2 u), where both activations are x / (1 + exp(-2 u))."""
        if activation == "silu":
            return jnp.exp(-gate)
        return jnp.exp((GELU_LINEAR + GELU_CUBIC * gate * gate) * gate)

    def kernel(x_ref: Any, w_ref: Any, layer_ref: Any, out_ref: Any) -> None:
        grid = (layer_ref[tiles] if grouped else tiles, n // out_tile_n)

        def no_op(*_: Any, **__: Any) -> None: ...

        slots = min(2, tile_n // epilogue_tile_n)

        @functools.partial(
            pl.run_scoped,
            buffers=pipeline(no_op, no_op).get_allocations(x_ref, w_ref, w_ref),
            out_smem=plgpu.SMEM(
                (2, slots, tile_m, epilogue_tile_n),
                out_ref.dtype,
                transforms=transforms(epilogue_tile_n),
            ),
            collective_axes="wg",
        )
        def _scope(buffers: Any, out_smem: Any) -> None:
            wg, block = lax.axis_index("wg"), lax.axis_index("cluster")
            wg_slice = pl.ds(wg * tile_m, tile_m)

            @plgpu.nd_loop((grid[0] * grid[1],), collective_axes="blocks")
            def _tiles(loop: Any) -> None:
                (number,) = loop.index
                m_index, n_index = plgpu.planar_snake(number, grid, 0, tiling.grid_tile_width)
                m_slice = pl.ds((2 * m_index + block) * block_m, block_m)
                k_slice = pl.ds(layer_ref[m_index if grouped else 0] * k, k)
                out_slice = pl.ds(n_index * out_tile_n, out_tile_n)
                gate_slice = pl.ds(n_index * out_tile_n, tile_n)
                up_slice = pl.ds((n if gated else tile_n) + n_index * out_tile_n, tile_n)

                def context(run: Any) -> None:
                    accumulator = plgpu.ACC((tile_m, tile_n), jnp.float32)

                    @functools.partial(pl.run_scoped, gate_acc=accumulator, up_acc=accumulator)
                    def _epilogue(gate_acc: Any, up_acc: Any) -> None:
                        run((gate_acc, up_acc))
                        gate, up = gate_acc[...], up_acc[...]
                        halves = [gate * up / (1.0 + exp_slope(gate))] if gated else [gate, up]
                        parts = tile_n // epilogue_tile_n
                        for part in range(len(halves) * parts):
                            half, at = divmod(part, parts)
                            columns = slice(at * epilogue_tile_n, (at + 1) * epilogue_tile_n)
                            whole = pl.ds(part * epilogue_tile_n, epilogue_tile_n)
                            slot = out_smem.at[wg, part % slots]
                            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                            slot[...] = halves[half].astype(out_ref.dtype)[:, columns]
                            plgpu.commit_smem()
                            tile = out_ref.at[m_slice, out_slice].at[wg_slice, whole]
                            plgpu.copy_smem_to_gmem(slot, tile)

                def multiply(_: Any, x_smem: Any, gate_smem: Any, up_smem: Any, accs: Any) -> Any:
                    plgpu.wgmma(accs[0], x_smem.at[wg_slice], gate_smem)
                    plgpu.wgmma(accs[1], x_smem.at[wg_slice], up_smem)
                    plgpu.wgmma_wait(0)
                    return accs

                pipeline(multiply, context)(
                    x_ref.at[m_slice, :],
                    w_ref.at[k_slice, gate_slice],
                    w_ref.at[k_slice, up_slice],
                    allocations=buffers,
                )

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    options = {"grid": (_multiprocessors() // 2,), **overrides}
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid_names=("blocks",),
        cluster=(2,),
        cluster_names=("cluster",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
        **options,
    )(x, w_gate_up, jnp.asarray(layer, jnp.int32).reshape(-1))


def _multiprocessors() -> int:
    """Streaming multiprocessors of the device; the H100 and the H200 have 132."""
    return getattr(jax.local_devices()[0], "core_count", 132)

"""Weights from Hugging Face safetensors files, without torch; only the layers needed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tpufleet.errors import BadInput
from tpufleet_activations.daemon_threads import DaemonThreads
from tpufleet_activations.input_errors import missing
from tpufleet_activations.io import dtypes, shards
from tpufleet_activations.io.file_digests import file_digest
from tpufleet_activations.model import meshes
from tpufleet_activations.model.architectures import Architecture

# Weights of a checkpoint that hidden states do not depend on.
UNUSED = re.compile(
    r"(^|\.)(lm_head|rotary_emb|vision_tower|vision_model|multi_modal_projector|score)\."
)
# Other types are quantized weights, whose scales are separate tensors.
WEIGHT_DTYPES = ("BF16", "F16", "F32", "F64")
BITS = np.uint16  # of a bfloat16
READERS = 8  # threads that read and transpose layers
HOST_SHARE = 0.25  # of the machine's memory, for shards on their way to the devices
ROOTS = ("model.", "", "model.language_model.", "language_model.model.", "language_model.")


def _tensors(path: Path) -> list[shards.Tensor]:
    """The tensors in the header of a safetensors file; raises if the file is truncated."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise _not_safetensors(path, f"{size:,} bytes")
        header = start + file.read(length)
    try:
        tensors = shards.read_header(header)
        for tensor in tensors:
            _check_dtype(tensor, dtypes.NUMPY_DTYPES)
        ends = [tensor.offset + tensor.nbytes for tensor in tensors]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _not_safetensors(path, error) from error
    if max(ends, default=0) > size:
        raise _not_safetensors(path, f"{size:,} of {max(ends):,} bytes")
    return tensors


def _not_safetensors(path: Path, reason: object) -> BadInput:
    return BadInput(f"{path} is not a safetensors file, or is truncated: {reason}")


def _check_dtype(tensor: shards.Tensor, allowed: Collection[str]) -> None:
    if tensor.dtype not in allowed:
        raise BadInput(
            f"{tensor.name} is stored as {tensor.dtype}; weights must be "
            f"{', '.join(WEIGHT_DTYPES)}: use a checkpoint that is not quantized"
        )


class ModelCheckpoint:
    """All tensors of a model folder by name, memory-mapped."""

    def __init__(self, folder: Path, *, as_bits: bool = False):
        """`as_bits`: bfloat16 weights are read as integers."""
        self.folder, self._as_bits = folder, as_bits
        self._tensors: dict[str, tuple[Path, shards.Tensor]] = {}
        for path in self.files():
            for tensor in _tensors(path):
                self._tensors[tensor.name] = (path, tensor)
        self.root = self._find_root()

    def files(self) -> list[Path]:
        for adapter in sorted(self.folder.glob("adapter_*")):
            raise BadInput(
                f"{adapter} belongs to an adapter, which is not applied here; use the merged model "
                "(`merge_and_unload` of PEFT, then `save_pretrained`), or move the adapter away"
            )
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            paths = [self.folder / name for name in names]
            for path in paths:
                if not path.exists():
                    raise missing(path)
            return paths
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise missing(self.folder / "*.safetensors")
        return files

    def names(self) -> set[str]:
        return set(self._tensors)

    def find(self, name: str, shape: tuple[int, ...]) -> tuple[Path, shards.Tensor]:
        """Where a weight is. Raises if it is missing, or of another type or shape."""
        full = self.root + name
        if full not in self._tensors:
            raise self._missing(full)
        path, tensor = self._tensors[full]
        _check_dtype(tensor, WEIGHT_DTYPES)
        if tensor.shape != shape:
            raise BadInput(
                f"{full} has shape {list(tensor.shape)}, expected {list(shape)} from config.json"
            )
        return path, tensor

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        path, tensor = self.find(name, shape)
        bits = self._as_bits and tensor.dtype == "BF16"
        kind = BITS if bits else dtypes.NUMPY_DTYPES[tensor.dtype]
        return np.memmap(path, kind, mode="r", offset=tensor.offset, shape=tensor.shape)

    def is_bf16(self) -> bool:
        """Whether all weights are stored in bfloat16."""
        return all(tensor.dtype == "BF16" for _, tensor in self._tensors.values())

    def digest(self) -> str:
        """Of config.json and all bytes of the weights."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        for path in self.files():
            digest.update(f"{path.name} {file_digest(path)} ".encode())
        return digest.hexdigest()

    def _find_root(self) -> str:
        for root in ROOTS:
            if f"{root}embed_tokens.weight" in self._tensors:
                return root
        raise self._missing("embed_tokens.weight")

    def _missing(self, name: str) -> BadInput:
        return BadInput(f"{self.folder} is not a checkpoint of this model: it has no {name}")


def load_parameters(
    folder: Path,
    arch: Architecture,
    *,
    depth: int,
    dtype: Any = jnp.bfloat16,
    mesh: Mesh,
    final_norm: bool = False,
    host_bytes: int | None = None,
) -> dict[str, Any]:
    """The parameters on the devices, with the weights of all layers stacked. Each parameter is read
    in passes that fill the shards of some devices, so that no more than HOST_SHARE of this
    machine's memory is in use, and only what this process's devices hold is kept."""
    checkpoint = ModelCheckpoint(folder)
    check_weights(checkpoint, arch, depth=depth, final_norm=final_norm)

    if host_bytes is None:
        host_bytes = int(HOST_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    shapes = parameter_shapes(arch, depth, final_norm, grouped=mesh.shape["tensor"] > 1)
    rules = layer_loaders(arch, grouped=mesh.shape["tensor"] > 1)
    # Copies of integers run in parallel; those of bfloat16 hold Python's lock.
    bits = ModelCheckpoint(folder, as_bits=True) if checkpoint.is_bf16() else checkpoint

    def put(name: str, values: np.ndarray) -> jax.Array:
        wanted = np.dtype(parameter_dtype(name, dtype))

        def read(indexes: Sequence[tuple[slice, ...]], shape: tuple[int, ...]) -> list[np.ndarray]:
            filled = [meshes.empty_shard(shape, wanted) for _ in indexes]
            bits = wanted == values.dtype == jnp.bfloat16
            for index, target in zip(indexes, filled, strict=True):
                source = values[index]
                (target.view(BITS) if bits else target)[...] = source.view(BITS) if bits else source
            return filled

        sharding = meshes.parameter_sharding(mesh, name)
        return meshes.shard_in_passes(values.shape, wanted, sharding, read, host_bytes)

    def stack(name: str) -> jax.Array:
        wanted = np.dtype(parameter_dtype(name, dtype))
        exact = wanted == jnp.bfloat16 and bits is not checkpoint
        source = bits if exact else checkpoint

        def read(indexes: Sequence[tuple[slice, ...]], shape: tuple[int, ...]) -> list[np.ndarray]:
            """The shards with these indexes, in one pass over the layers."""
            filled = [meshes.empty_shard(shape, wanted) for _ in indexes]

            def fill(layer: int) -> None:
                values = rules[name](source, layer)
                for index, target in zip(indexes, filled, strict=True):
                    (target.view(BITS) if exact else target)[layer] = values[index[1:]]

            threads.map(fill, range(depth))
            return filled

        sharding = meshes.parameter_sharding(mesh, name)
        return meshes.shard_in_passes(shapes["layers"][name], wanted, sharding, read, host_bytes)

    readers, other = DaemonThreads(READERS, "extract-reader"), DaemonThreads(1, "extract-reader")
    with readers as threads, other as beside:
        table = checkpoint.read("embed_tokens.weight", (arch.vocabulary, arch.hidden))
        embed = beside.submit(put, "embed", table)
        layers = {name: stack(name) for name in rules} if depth else {}
        params: dict[str, Any] = {"embed": embed.result(), "layers": layers}
    if final_norm:
        params["final_norm"] = put("final_norm", checkpoint.read("norm.weight", (arch.hidden,)))
    return params


def parameter_dtype(name: str, dtype: Any) -> Any:
    """Norms are kept in float32."""
    return jnp.float32 if "norm" in name else dtype


def abstract_parameters(
    arch: Architecture, *, depth: int, dtype: Any, mesh: Mesh, final_norm: bool = False
) -> dict[str, Any]:
    """The shapes, types and shardings of `load_parameters`, to compile with."""
    shapes = parameter_shapes(arch, depth, final_norm, grouped=mesh.shape["tensor"] > 1)

    def one(name: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            shape, parameter_dtype(name, dtype), sharding=meshes.parameter_sharding(mesh, name)
        )

    layers = {name: one(name, shape) for name, shape in shapes["layers"].items() if depth}
    whole = {name: one(name, shape) for name, shape in shapes.items() if name != "layers"}
    return {**whole, "layers": layers}


def layer_loaders(
    arch: Architecture, grouped: bool = False
) -> dict[str, Callable[[ModelCheckpoint, int], np.ndarray]]:
    """Functions that read a layer's part of each stacked parameter. With `grouped`, the queries,
    key and value of each key-value head are adjacent; otherwise all queries come first."""
    hidden, wide, inner = arch.hidden, arch.heads * arch.head_dim, arch.intermediate
    narrow = arch.kv_heads * arch.head_dim

    def one(name: str, *shape: int) -> Callable[[ModelCheckpoint, int], np.ndarray]:
        return lambda checkpoint, layer: checkpoint.read(f"layers.{layer}.{name}", shape)

    def transposed(name: str, out: int, into: int) -> Callable[[ModelCheckpoint, int], np.ndarray]:
        read = one(name, out, into)
        return lambda checkpoint, layer: read(checkpoint, layer).T

    def qkv(part: str, *tail: int) -> Callable[[ModelCheckpoint, int], np.ndarray]:
        def read(checkpoint: ModelCheckpoint, layer: int) -> np.ndarray:
            heads = (arch.kv_heads, -1) if grouped else (-1,)
            pieces = [
                one(f"self_attn.{letter}_proj.{part}", size, *tail)(checkpoint, layer).reshape(
                    *heads, arch.head_dim, *tail
                )
                for letter, size in (("q", wide), ("k", narrow), ("v", narrow))
            ]
            joined = np.concatenate(pieces, axis=int(grouped))
            return np.moveaxis(joined, -1, 0) if tail else joined

        return read

    def gate_up(part: str, *tail: int) -> Callable[[ModelCheckpoint, int], np.ndarray]:
        def read(checkpoint: ModelCheckpoint, layer: int) -> np.ndarray:
            pieces = [
                one(f"mlp.{name}_proj.{part}", inner, *tail)(checkpoint, layer)
                for name in ("gate", "up")
            ]
            if not tail:
                return np.stack(pieces)
            joined = np.empty((hidden, len(pieces), inner), pieces[0].dtype)
            for number, piece in enumerate(pieces):  # several times faster than all at once
                joined[:, number] = piece.T
            return joined

        return read

    mlp_norm = "pre_feedforward_layernorm" if arch.post_norms else "post_attention_layernorm"
    rules = {
        "qkv": qkv("weight", hidden),
        "out": transposed("self_attn.o_proj.weight", hidden, wide),
        "gate_up": gate_up("weight", hidden),
        "down": transposed("mlp.down_proj.weight", hidden, inner),
    }
    if arch.pre_norms:
        rules["attention_norm"] = one("input_layernorm.weight", hidden)
        rules["mlp_norm"] = one(f"{mlp_norm}.weight", hidden)
    if arch.qkv_bias:
        rules["qkv_bias"] = qkv("bias")
    if arch.out_bias:
        rules["out_bias"] = one("self_attn.o_proj.bias", hidden)
    if arch.mlp_bias:
        rules["gate_up_bias"] = gate_up("bias")
        rules["down_bias"] = one("mlp.down_proj.bias", hidden)
    if arch.head_norm or arch.joint_norm:
        query, key = (wide, narrow) if arch.joint_norm else (arch.head_dim, arch.head_dim)
        rules["query_norm"] = one("self_attn.q_norm.weight", query)
        rules["key_norm"] = one("self_attn.k_norm.weight", key)
    if arch.post_norms:
        rules["attention_post_norm"] = one("post_attention_layernorm.weight", hidden)
        rules["mlp_post_norm"] = one("post_feedforward_layernorm.weight", hidden)
    return rules


def check_weights(
    checkpoint: ModelCheckpoint, arch: Architecture, *, depth: int, final_norm: bool
) -> None:
    """Raise if `load_parameters` would, without reading any weight."""
    checkpoint.find("embed_tokens.weight", (arch.vocabulary, arch.hidden))
    if final_norm:
        checkpoint.find("norm.weight", (arch.hidden,))
    for name, shape in _layer_weights(arch, depth):
        checkpoint.find(name, shape)
    check_unknown_weights(checkpoint, arch)


def check_unknown_weights(checkpoint: ModelCheckpoint, arch: Architecture) -> None:
    """Raise if there are weights that this architecture ignores: results would be wrong."""
    known = {"embed_tokens.weight", "norm.weight"}
    known |= {name for name, _ in _layer_weights(arch, arch.layers)}
    unknown = sorted(
        name
        for name in checkpoint.names()
        if name.removeprefix(checkpoint.root) not in known and not UNUSED.search(name)
    )
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise BadInput(f"unknown weights for {arch.family}: {', '.join(unknown[:5])}{more}")


def _layer_weights(arch: Architecture, depth: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of the weights of so many layers."""
    recorder = ShapeRecorder()
    for load in layer_loaders(arch).values():
        load(recorder, 0)
    for layer in range(depth):
        for name, shape in recorder.names_read.items():
            yield f"layers.{layer}.{name.removeprefix('layers.0.')}", shape


class ShapeRecorder(ModelCheckpoint):
    """A checkpoint of uninitialized weights that records which names are read."""

    def __init__(self) -> None:
        self.names_read: dict[str, tuple[int, ...]] = {}

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        self.names_read[name] = shape
        return np.empty(shape, np.int8)


def parameter_shapes(
    arch: Architecture, depth: int, final_norm: bool, grouped: bool = False
) -> Mapping[str, Any]:
    """The shapes of the parameters that `load_parameters` returns."""
    rules = layer_loaders(arch, grouped)
    layers = {name: (depth, *rule(ShapeRecorder(), 0).shape) for name, rule in rules.items()}
    known = {"embed": (arch.vocabulary, arch.hidden), "layers": layers}
    return {**known, "final_norm": (arch.hidden,)} if final_norm else known

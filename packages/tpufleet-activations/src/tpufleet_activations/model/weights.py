"""Weights from Hugging Face safetensors files, without torch; only the layers needed."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tpufleet.errors import BadInput, missing
from tpufleet_activations.daemon_threads import DaemonThreads
from tpufleet_activations.input_errors import check_shape
from tpufleet_activations.io import dtypes, shards
from tpufleet_activations.io.file_digests import file_digest
from tpufleet_activations.model import meshes, quantized
from tpufleet_activations.model.architectures import Architecture
from tpufleet_activations.model.families import FAMILIES

# Weights of a checkpoint that hidden states do not depend on.
UNUSED = re.compile(
    r"(^|\.)(lm_head|embed_out|rotary_emb|vision_tower|vision_model|multi_modal_projector|score)\."
    r"|\.(attn|attention)\.(bias|masked_bias)$"
)
# Other types are quantized weights, whose scales are separate tensors: see `quantized`.
WEIGHT_DTYPES = ("BF16", "F16", "F32", "F64")
READERS = 8  # threads that read weights
COMPILERS = 4  # threads that compile what puts weights into place
# Parameters that no layer has are read in so many pieces, if they have more values than this.
PIECES, DIVIDED = 16, 1 << 24
BYTES_AHEAD = 4 << 30  # of weights that are read before they are put into place
HOST_SHARE = 0.25  # of the machine's memory, for weights on their way to the devices
ROOTS = (
    "model.", "", "model.language_model.", "language_model.model.", "language_model.",
    "transformer.", "gpt_neox.",
)  # fmt: skip


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
            f"{', '.join(WEIGHT_DTYPES)}, or quantized as {', '.join(quantized.METHODS)}"
        )


class ModelCheckpoint:
    """All tensors of a model folder by name."""

    def __init__(self, folder: Path):
        self.folder = folder
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

    def has(self, name: str) -> bool:
        """Whether there is a weight of this name, in or beside the decoder."""
        return self._full(name) is not None

    def _full(self, name: str) -> str | None:
        for full in (self.root + name, name):
            if full in self._tensors or quantized.tensors_of(full, self._tensors):
                return full
        return None

    def find(self, name: str, shape: tuple[int, ...]) -> tuple[str, str]:
        """The whole name of a weight and its type, "" if it is quantized. Raises if it is missing,
        or of another type or shape."""
        full = self._full(name)
        if full is None:
            raise self._missing(self.root + name)
        expected, dtype = {full: shape}, ""
        if quantized.tensors_of(full, self._tensors):
            shape = self._quantized_shape(shape)
            expected = quantized.expected_shapes(full, self._tensors, shape, self._quantization)
        else:
            tensor = self._tensors[full][1]
            _check_dtype(tensor, WEIGHT_DTYPES)
            dtype = tensor.dtype
        for one, wanted in expected.items():
            check_shape(one, self._tensors[one][1].shape, wanted)
        return full, dtype

    def dtype(self, name: str, shape: tuple[int, ...]) -> np.dtype:
        """That in which `read_into` reads a weight without converting it."""
        return dtypes.NUMPY_DTYPES[self.find(name, shape)[1] or "F32"]

    def read_into(
        self, name: str, shape: tuple[int, ...], target: np.ndarray, first: int = 0
    ) -> None:
        """Read a weight of this shape into an array, from a row on."""
        full, dtype = self.find(name, shape)
        if dtype:
            self._read_plain(full, target, first)
            return
        stored = self._quantized_shape(shape)
        values = quantized.dequantize(
            full, self._tensors.keys(), self._read_whole, stored, self._quantization
        )
        values = values.T if self._input_first else values
        target[...] = values[first : first + len(target)]

    def _quantized_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Quantized weights are [output, input], also where others are [input, output]."""
        return shape[::-1] if self._input_first else shape

    @functools.cached_property
    def _config(self) -> Mapping[str, Any]:
        config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return config

    @property
    def _quantization(self) -> Mapping[str, Any]:
        return self._config.get("quantization_config") or {}

    @property
    def _input_first(self) -> bool:
        family = FAMILIES.get(self._config.get("model_type", ""))
        return family is not None and bool(family.facts.get("input_first"))

    def _read_whole(self, full: str) -> np.ndarray:
        tensor = self._tensors[full][1]
        values = np.empty(tensor.shape, dtypes.NUMPY_DTYPES[tensor.dtype])
        self._read_plain(full, values)
        return values

    def _read_plain(self, full: str, target: np.ndarray, first: int = 0) -> None:
        path, tensor = self._tensors[full]
        kind = dtypes.NUMPY_DTYPES[tensor.dtype]
        if target.dtype != kind:
            values = np.memmap(path, kind, mode="r", offset=tensor.offset, shape=tensor.shape)
            target[...] = values[first : first + len(target)]
            return
        # Not through a memory map: its pages are mapped one by one.
        memory = target.reshape(-1).view(np.uint8).data
        with open(path, "rb", buffering=0) as file:
            file.seek(tensor.offset + first * math.prod(tensor.shape[1:]) * kind.itemsize)
            while memory:
                count = file.readinto(memory)
                if not count:
                    raise _not_safetensors(path, f"{full} ends early")
                memory = memory[count:]

    def digest(self) -> str:
        """Of config.json and all bytes of the weights."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        for path in self.files():
            digest.update(f"{path.name} {file_digest(path)} ".encode())
        return digest.hexdigest()

    def _find_root(self) -> str:
        tables = sorted({family.names["embed"] for family in FAMILIES.values()})
        for root in ROOTS:
            if any(f"{root}{table}.weight" in self._tensors for table in tables):
                return root
        raise self._missing(" or ".join(f"{table}.weight" for table in tables))

    def _missing(self, name: str) -> BadInput:
        return BadInput(f"{self.folder} is not a checkpoint of this model: it has no {name}")


class Rule(NamedTuple):
    """How one parameter, or its part for one layer, is made: the weights, which are joined along
    their first axis as they are stored, and what is done with them on the devices."""

    weights: tuple[tuple[str, tuple[int, ...]], ...]
    arrange: Callable[[Any], Any] = lambda joined: joined

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of the joined weights."""
        shapes = [shape for _, shape in self.weights]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def shape(self) -> tuple[int, ...]:
        joined = jax.ShapeDtypeStruct(self.stored, jnp.float32)
        return tuple(jax.eval_shape(self.arrange, joined).shape)


@dataclass(frozen=True, slots=True)
class _Piece:
    """What is read and sent at a time: a layer's part of a parameter, or some rows of another."""

    name: str
    rule: Rule
    first: int  # the layer, or the first row
    rows: int = 0
    prefix: str = ""

    @property
    def stored(self) -> tuple[int, ...]:
        whole = self.rule.stored
        return (self.rows, *whole[1:]) if self.rows else whole

    @property
    def bytes(self) -> int:
        """At most."""
        return 4 * math.prod(self.stored)

    def kind(self, checkpoint: ModelCheckpoint) -> np.dtype:
        """The type in which all of its weights are stored, or float32."""
        found = {checkpoint.dtype(self.prefix + name, shape) for name, shape in self.rule.weights}
        return found.pop() if len(found) == 1 else np.dtype(np.float32)


def _divided(name: str, rule: Rule) -> list[_Piece]:
    """A parameter that no layer has; a large one in pieces of the same size."""
    count = rule.stored[0]
    rows = count // (math.gcd(count, PIECES) if math.prod(rule.stored) > DIVIDED else 1)
    return [_Piece(name, rule, first, rows) for first in range(0, count, rows)]


def load_parameters(
    folder: Path,
    arch: Architecture,
    *,
    depth: int,
    dtype: Any = jnp.bfloat16,
    mesh: Mesh,
    final_norm: bool = False,
    head: bool = False,
    host_bytes: int | None = None,
) -> dict[str, Any]:
    """The parameters on the devices, with the weights of all layers stacked. Threads read weights
    as they are stored and send them, while devices put earlier ones into place. So much of this
    machine's memory is in use at most: `host_bytes`, or one layer's part of a parameter."""
    checkpoint = ModelCheckpoint(folder)
    check_weights(checkpoint, arch, depth=depth, final_norm=final_norm, head=head)
    if host_bytes is None:
        host_bytes = int(HOST_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    loading, grouped = meshes.loading_mesh(mesh), mesh.shape["tensor"] > 1
    own_head = has_head(checkpoint, arch, head)
    shaped: dict[str, Any] = {"depth": depth, "dtype": dtype, "final_norm": final_norm}
    abstract = abstract_parameters(arch, mesh=loading, head=own_head, **shaped)
    params = _empty(abstract)
    layers: dict[str, jax.Array] = params["layers"]
    pieces: list[_Piece] = []
    for name, rule in single_rules(arch, final_norm=final_norm, head=own_head).items():
        pieces += _divided(name, rule)
    for name, rule in layer_rules(arch, grouped).items() if depth else ():
        pieces += [_Piece(name, rule, n, prefix=_layer_prefix(arch, n)) for n in range(depth)]

    def read(piece: _Piece) -> jax.Array:
        joined = np.empty(piece.stored, piece.kind(checkpoint))
        start = 0
        for name, shape in piece.rule.weights:
            size = len(joined) if piece.rows else shape[0]
            first = piece.first if piece.rows else 0
            part = joined[start : start + size]
            checkpoint.read_into(piece.prefix + name, shape, part, first)
            start += size
        place = meshes.stored_sharding(loading, joined.shape)
        return jax.make_array_from_callback(joined.shape, place, lambda index: joined[index])

    def compile_insert(piece: _Piece, kind: np.dtype) -> Any:
        stack = abstract["layers"][piece.name] if piece.prefix else abstract[piece.name]
        place = meshes.stored_sharding(loading, piece.stored)
        stored = jax.ShapeDtypeStruct(piece.stored, kind, sharding=place)
        insert = _insert(piece.rule.arrange, stack.sharding)
        return insert.lower(stack, stored, np.int32(0)).compile()

    # Processes of one mesh may have to compile the same program at the same time.
    together = 1 if jax.process_count() > 1 else COMPILERS
    compilers = DaemonThreads(together, "extract-compiler")
    readers = DaemonThreads(READERS, "extract-reader")
    programs: dict[tuple[str, np.dtype], Future[Any]] = {}
    with compilers as compiling, readers as threads:
        kinds = [(piece.name, piece.kind(checkpoint)) for piece in pieces]
        for piece, key in zip(pieces, kinds, strict=True):
            if key not in programs:
                programs[key] = compiling.submit(compile_insert, piece, key[1])
        waiting: deque[Future[jax.Array]] = deque()
        unread, in_memory, limit = deque(pieces), 0, min(host_bytes, BYTES_AHEAD)
        for piece, key in zip(pieces, kinds, strict=True):
            while unread and (not waiting or in_memory + unread[0].bytes <= limit):
                in_memory += unread[0].bytes
                waiting.append(threads.submit(read, unread.popleft()))
            stored = waiting.popleft().result()
            of = layers if piece.prefix else params
            of[piece.name] = programs[key].result()(of[piece.name], stored, np.int32(piece.first))
            in_memory -= piece.bytes
    jax.block_until_ready(params)
    if loading is mesh:
        return params
    spread = lambda path, one: meshes.share(one, meshes.parameter_sharding(mesh, path[-1].key))
    shared: dict[str, Any] = jax.tree_util.tree_map_with_path(spread, params)
    return shared


def _empty(abstract: Any) -> dict[str, Any]:
    zeros = lambda: jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), abstract)
    shardings = jax.tree.map(lambda one: one.sharding, abstract)
    made: dict[str, Any] = jax.jit(zeros, out_shardings=shardings)()
    return made


@functools.cache
def _insert(arrange: Callable[[Any], Any], sharding: Any) -> Any:
    """Puts a layer's part, or rows, into a parameter, in place."""

    def insert(parameter: Any, stored: Any, first: Any) -> Any:
        part = arrange(stored).astype(parameter.dtype)
        part = part if part.ndim == parameter.ndim else part[None]
        return jax.lax.dynamic_update_slice_in_dim(parameter, part, first, 0)

    return jax.jit(insert, donate_argnums=0, out_shardings=sharding)


def _layer_prefix(arch: Architecture, layer: int) -> str:
    return FAMILIES[arch.family].names["layer"].format(layer)


def has_head(checkpoint: ModelCheckpoint, arch: Architecture, wanted: bool) -> bool:
    """Whether the output head is a weight of its own: else it is the embedding."""
    if not wanted or arch.tied:
        return False
    return arch.tied is False or checkpoint.has(f"{FAMILIES[arch.family].names['head']}.weight")


def parameter_dtype(name: str, dtype: Any) -> Any:
    """Norms and sinks are kept in float32."""
    return jnp.float32 if "norm" in name or name == "sinks" else dtype


def abstract_parameters(
    arch: Architecture,
    *,
    depth: int,
    dtype: Any,
    mesh: Mesh,
    final_norm: bool = False,
    head: bool = False,
) -> dict[str, Any]:
    """The shapes, types and shardings of `load_parameters`, to compile with. `head`: it is a weight
    of its own."""
    shapes = parameter_shapes(arch, depth, final_norm, grouped=mesh.shape["tensor"] > 1, head=head)

    def one(name: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            shape, parameter_dtype(name, dtype), sharding=meshes.parameter_sharding(mesh, name)
        )

    layers = {name: one(name, shape) for name, shape in shapes["layers"].items() if depth}
    whole = {name: one(name, shape) for name, shape in shapes.items() if name != "layers"}
    return {**whole, "layers": layers}


def single_rules(arch: Architecture, *, final_norm: bool, head: bool) -> dict[str, Rule]:
    """Parameters that no layer has."""
    names, table = FAMILIES[arch.family].names, (arch.vocabulary, arch.hidden)
    one = lambda name, *shape: Rule(((name, shape),))
    rules = {"embed": one(f"{names['embed']}.weight", *table)}
    if arch.learned_positions:
        assert arch.max_positions is not None
        shape = (arch.max_positions, arch.hidden)
        rules["positions"] = one(f"{names['positions']}.weight", *shape)
    if head:
        rules["head"] = one(f"{names['head']}.weight", *table)
    if final_norm:
        rules["final_norm"] = one(f"{names['final_norm']}.weight", arch.hidden)
        if arch.layer_norm:
            rules["final_norm_bias"] = one(f"{names['final_norm']}.bias", arch.hidden)
    return rules


@functools.cache
def layer_rules(arch: Architecture, grouped: bool = False) -> dict[str, Rule]:
    """The parameters of a layer; names are relative to it. With `grouped`, the queries, key and
    value of each key-value head are adjacent; otherwise all queries come first."""
    names = FAMILIES[arch.family].names
    hidden, wide, inner = arch.hidden, arch.heads * arch.head_dim, arch.intermediate
    narrow = arch.kv_heads * arch.head_dim
    rules: dict[str, Rule] = {}

    def linear(part: str, out: int, into: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        shape = (into, out) if arch.input_first else (out, into)
        return ((f"{names[part]}.weight", shape),)

    def bias(part: str, size: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return ((f"{names[part]}.bias", (size,)),)

    output_first = lambda joined: joined.T if arch.input_first and joined.ndim > 1 else joined
    input_first = lambda joined: output_first(joined).T

    def heads(joined: Any) -> Any:
        joined = output_first(joined)
        tail = joined.shape[1:]
        if arch.interleaved_qkv:
            joined = joined.reshape(arch.heads, 3, arch.head_dim, *tail).swapaxes(0, 1)
        joined = joined.reshape(-1, arch.head_dim, *tail)
        if grouped:
            pieces = jnp.split(joined, [arch.heads, arch.heads + arch.kv_heads])
            pieces = [part.reshape(arch.kv_heads, -1, arch.head_dim, *tail) for part in pieces]
            joined = jnp.concatenate(pieces, axis=1)
        return jnp.moveaxis(joined, -1, 0) if tail else joined

    def paired(joined: Any) -> Any:
        joined = output_first(joined)
        joined = joined.reshape(-1, inner, *joined.shape[1:])
        return jnp.moveaxis(joined, -1, 0) if joined.ndim > 2 else joined

    sizes = {"query": wide, "key": narrow, "value": narrow}
    joint = {"qkv": wide + 2 * narrow}
    projected = joint if "qkv" in names else sizes
    each = lambda parts, make: tuple(one for part in parts.items() for one in make(*part))
    rules["qkv"] = Rule(each(projected, lambda part, size: linear(part, size, hidden)), heads)
    if arch.qkv_bias:
        rules["qkv_bias"] = Rule(each(projected, bias), heads)
    rules["out"] = Rule(linear("out", hidden, wide), input_first)
    if arch.out_bias:
        rules["out_bias"] = Rule(bias("out", hidden))
    if arch.sinks:
        rules["sinks"] = Rule(((names["sinks"], (arch.heads,)),))
    if arch.experts:
        rules |= _expert_rules(arch, names)
    else:
        parts = {"gate": inner, "up": inner} if arch.gated else {"up": inner}
        parts = {"gate_up": 2 * inner} if "gate_up" in names else parts
        weights = each(parts, lambda part, size: linear(part, size, hidden))
        rules["gate_up"] = Rule(weights, paired)
        rules["down"] = Rule(linear("down", hidden, inner), input_first)
        if arch.mlp_bias:
            rules["gate_up_bias"] = Rule(each(parts, bias), paired)
            rules["down_bias"] = Rule(bias("down", hidden))
    norms = {"attention_norm": hidden, "mlp_norm": hidden} if arch.pre_norms else {}
    if arch.post_norms:
        norms |= {"attention_post_norm": hidden, "mlp_post_norm": hidden}
    if arch.head_norm or arch.joint_norm:
        joint_norm = {"query_norm": wide, "key_norm": narrow}
        norms |= joint_norm if arch.joint_norm else dict.fromkeys(joint_norm, arch.head_dim)
    for part, size in norms.items():
        rules[part] = Rule(((f"{names[part]}.weight", (size,)),))
        if arch.layer_norm:
            rules[f"{part}_bias"] = Rule(bias(part, size))
    return rules


def _expert_rules(arch: Architecture, names: Mapping[str, str]) -> dict[str, Rule]:
    hidden, inner, count = arch.hidden, arch.intermediate, arch.experts
    router = Rule(((f"{names['router']}.weight", (count, hidden)),), lambda joined: joined.T)
    if "experts" not in names:
        each = range(count)
        of = lambda part, number, *shape: (f"{names[part].format(number)}.weight", shape)
        return {
            "router": router,
            "expert_gate_up": Rule(
                tuple(of(part, n, inner, hidden) for n in each for part in ("gate", "up")),
                lambda joined: jnp.moveaxis(joined.reshape(count, 2, inner, hidden), -1, 1),
            ),
            "expert_down": Rule(
                tuple(of("down", n, hidden, inner) for n in each),
                lambda joined: joined.reshape(count, hidden, inner).swapaxes(1, 2),
            ),
        }
    name = names["experts"]
    alternating = lambda joined: joined.reshape(*joined.shape[:-1], inner, 2).swapaxes(-1, -2)
    return {
        "router": router,
        "router_bias": Rule(((f"{names['router']}.bias", (count,)),)),
        "expert_gate_up": Rule(
            ((f"{name}.gate_up_proj", (count, hidden, 2 * inner)),), alternating
        ),
        "expert_gate_up_bias": Rule(
            ((f"{name}.gate_up_proj_bias", (count, 2 * inner)),), alternating
        ),
        "expert_down": Rule(((f"{name}.down_proj", (count, inner, hidden)),)),
        "expert_down_bias": Rule(((f"{name}.down_proj_bias", (count, hidden)),)),
    }


def check_weights(
    checkpoint: ModelCheckpoint,
    arch: Architecture,
    *,
    depth: int,
    final_norm: bool,
    head: bool = False,
) -> None:
    """Raise if `load_parameters` would, without reading any weight."""
    own_head = has_head(checkpoint, arch, head)
    for name, shape in checkpoint_weights(arch, depth, final_norm=final_norm, head=own_head):
        checkpoint.find(name, shape)
    check_unknown_weights(checkpoint, arch)


def check_unknown_weights(checkpoint: ModelCheckpoint, arch: Architecture) -> None:
    """Raise if there are weights that this architecture ignores: results would be wrong."""
    known = {name for name, _ in checkpoint_weights(arch, arch.layers, final_norm=True, head=True)}
    unknown = sorted(
        name
        for name in checkpoint.names()
        if quantized.weight_of(name.removeprefix(checkpoint.root)) not in known
        and not UNUSED.search(name)
    )
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise BadInput(f"unknown weights for {arch.family}: {', '.join(unknown[:5])}{more}")


def checkpoint_weights(
    arch: Architecture, depth: int, *, final_norm: bool, head: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of the weights of so many layers."""
    for rule in single_rules(arch, final_norm=final_norm, head=head).values():
        yield from rule.weights
    for layer in range(depth):
        prefix = _layer_prefix(arch, layer)
        for rule in layer_rules(arch).values():
            yield from ((prefix + name, shape) for name, shape in rule.weights)


def parameter_shapes(
    arch: Architecture,
    depth: int,
    final_norm: bool,
    grouped: bool = False,
    head: bool = False,
) -> Mapping[str, Any]:
    """The shapes of the parameters that `load_parameters` returns."""
    rules = layer_rules(arch, grouped)
    layers = {name: (depth, *rule.shape) for name, rule in rules.items()}
    once = single_rules(arch, final_norm=final_norm, head=head)
    return {**{name: rule.shape for name, rule in once.items()}, "layers": layers}

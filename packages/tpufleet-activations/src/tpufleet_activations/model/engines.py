"""A model on its devices: takes batches, returns stacks of activations on the host."""

from __future__ import annotations

import functools
import re
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpufleet.errors import BadInput, install_command
from tpufleet_activations.daemon_threads import DaemonThreads
from tpufleet_activations.io import dtypes
from tpufleet_activations.model import (
    architectures,
    decoder,
    encoders,
    host_memory,
    kernel_choice,
    meshes,
    sites,
    weights,
)
from tpufleet_activations.model.batch import Batch
from tpufleet_activations.model.program_cache import ProgramCache
from tpufleet_activations.start_times import StartTimes

# The lower bound in pyproject.toml: 0.7.0 lacks functions of Pallas, and its TPU kernel refuses
# head size 64. Tested by `-m versions`.
OLDEST_JAX = (0, 7, 2)
COMPILERS = 4  # programs compiled at once
# Dense bf16 peak of one device, in operations per second, by a part of its name.
PEAKS = {
    "v4": 275e12,
    "v5 lite": 197e12,
    "v5e": 197e12,
    "v5p": 459e12,
    "v5": 459e12,
    "v6": 918e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
}


@dataclass(frozen=True, slots=True)
class OutputBlock:
    """Some rows of a batch, starting at `first_row`: {site: [rows, length, width]}."""

    first_row: int
    values: Mapping[str, np.ndarray]


class Engine:
    """Parameters are transferred to the devices once; after that only tokens are."""

    def __init__(
        self,
        forward: decoder.Forward,
        params: Mapping[str, Any],
        mesh: Mesh,
        *,
        memory: str = "auto",
        cache: ProgramCache | None = None,
    ):
        """`memory` is how outputs are copied to the host: see `host_memory`. Programs are taken
        from `cache`, and kept there."""
        self.forward, self.params, self.mesh, self._cache = forward, params, mesh, cache
        self._batch = meshes.batch_sharding(mesh)
        kind = host_memory.memory_kind(mesh, memory)
        self._host = None if kind is None else meshes.output_sharding(mesh, kind)
        self.platform = mesh.devices.flat[0].platform
        self._in_place = kind is not None and self.platform in host_memory.ADDRESSABLE
        self._options = kernel_choice.compiler_options(mesh, params["embed"].dtype, cache)
        self.step = jax.jit(
            self.forward,
            out_shardings=meshes.output_sharding(mesh),
            compiler_options=self._options,
        )
        self._programs: dict[tuple[tuple[int, ...], bool], Future[Any]] = {}
        # Processes of one mesh may have to compile the same program at the same time.
        self._compilers = DaemonThreads(
            1 if jax.process_count() > 1 else COMPILERS, "extract-compiler"
        )
        weakref.finalize(self, self._compilers.close)
        self._saved: list[Future[None]] = []
        self.compile_seconds = 0.0  # that batches have waited for

    @property
    def device_kind(self) -> str:
        """Such as "TPU v5 lite x 4"."""
        kind = self.mesh.devices.flat[0].device_kind
        return kind if self.mesh.size == 1 else f"{kind} x {self.mesh.size}"

    @property
    def vocabulary(self) -> int:
        return self.forward.architecture.vocabulary

    @property
    def row_multiple(self) -> int:
        """Batches must have a multiple of this many rows."""
        return meshes.batch_shards(self.mesh)

    @property
    def varlen(self) -> bool:
        """Whether attention of packed rows costs no more than that of their samples."""
        return self.forward.attention_kernel(self.params["embed"].dtype, packed=True) == "varlen"

    def start(self, batch: Batch) -> Callable[[], list[OutputBlock]]:
        """Start a batch; the returned function waits for it and returns this process's rows."""
        outputs = self.compute(batch)
        if self._host is not None:
            outputs = jax.device_put(outputs, self._host)
        shards = [self._own_shards(array) for array in jax.tree.leaves(outputs)]
        if not self._in_place:
            for shard in jax.tree.leaves(shards):
                shard.copy_to_host_async()
        return lambda: self._fetch(shards)

    def compute(self, batch: Batch) -> Any:
        """Start a batch; its stacks stay on the devices."""
        arrays = (batch.tokens, batch.positions, batch.segments)
        placed = [
            None if array is None else meshes.shard_array(np.ascontiguousarray(array), self._batch)
            for array in arrays
        ]
        program = self._program(batch)
        if not program.done():
            began = time.perf_counter()
            program.result()
            self.compile_seconds += time.perf_counter() - began
        with jax.transfer_guard_host_to_device("disallow"):
            return program.result()(self.params, *placed)

    def compile_ahead(self, batches: Iterable[Batch]) -> None:
        """Compile the programs of these batches; except on GPUs, concurrently in the background."""
        for batch in batches:
            self._program(batch)

    @property
    def programs(self) -> int:
        """Programs compiled or being compiled: one for each shape of a batch."""
        return len(self._programs)

    def _program(self, batch: Batch) -> Future[Any]:
        key = (batch.tokens.shape, batch.segments is not None)
        if key not in self._programs:
            compile_step = functools.partial(self._compile, *key)
            if self.platform == "gpu":
                # Loading a program while another thread records a CUDA graph breaks the graph.
                future: Future[Any] = Future()
                began = time.perf_counter()
                future.set_result(compile_step())
                self.compile_seconds += time.perf_counter() - began
                self._programs[key] = future
            else:
                self._programs[key] = self._compilers.submit(compile_step)
        return self._programs[key]

    def _compile(self, shape: tuple[int, ...], packed: bool) -> Any:
        parts = (self._description(), shape, packed)
        program = None if self._cache is None else self._cache.load(parts)
        if program is None:
            tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=self._batch)
            segments = tokens if packed else None
            program = self.step.lower(self.params, tokens, tokens, segments).compile()
            if self._cache is not None:
                self._saved.append(self._compilers.submit(self._cache.save, parts, program))
        return program

    def finish_saving(self) -> None:
        """Wait until the programs are in the cache, for the next run."""
        for saved in self._saved:
            saved.result()

    def _description(self) -> tuple[Any, ...]:
        """What a program depends on, apart from the shape of the batch."""
        forward = self.forward
        params = jax.tree.map(lambda one: (one.shape, str(one.dtype)), self.params)
        settings = (forward.sites, forward.dtype, forward.kernel, sorted(forward.unavailable))
        kernels = (forward.gate_kernel, forward.platform, forward.longest, sorted(self._options))
        encoder = forward.encoder and (forward.encoder.site, forward.encoder.k)
        shape = list(self.mesh.shape.items())
        return (forward.architecture, *settings, *kernels, encoder, params, shape)

    def finding(self, parts: Any, find: Callable[[], Any], *, renew: bool = False) -> Any:
        """What `find` returns for this model on these devices; kept, if it is not 0."""
        if self._cache is None:
            return find()
        return self._cache.finding((self._description(), parts), find, keep=bool, renew=renew)

    def is_out_of_memory(self, error: Exception) -> bool:
        text = str(error)
        return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in text

    def rows(self, count: int) -> frozenset[int]:
        """The rows of a batch of `count` rows that this process keeps."""
        height = count // self.row_multiple
        return frozenset(
            row
            for part, _ in self._own_parts()
            for row in range(part * height, (part + 1) * height)
        )

    def flops(self, batch: Batch) -> float:
        """Operations for the real tokens of a batch, without padding."""
        arch, depth = self.forward.architecture, self._depth()
        return sum(arch.flops(span.length, depth) for span in batch.spans)

    def peak_flops(self) -> float | None:
        """The peak rate of the mesh; None for unknown devices."""
        kind = self.mesh.devices.flat[0].device_kind
        rate = next((rate for name, rate in PEAKS.items() if name in kind), None)
        return None if rate is None else rate * self.mesh.size

    def _depth(self) -> int:
        return sites.layers_needed(self.forward.sites, self.forward.architecture)

    def _own_parts(self) -> list[tuple[int, Any]]:
        """(part of the batch, device) for the parts that this process keeps. Devices along the
        tensor axis hold copies of the same rows; the first one is used."""
        first = self.mesh.devices[:, :, 0].reshape(-1)
        process = jax.process_index()
        return [(n, device) for n, device in enumerate(first) if device.process_index == process]

    def _own_shards(self, stack: jax.Array) -> list[jax.Array]:
        if self.mesh.size == 1:
            return [stack]
        by_device = {shard.device: shard.data for shard in stack.addressable_shards}
        return [by_device[device] for _, device in self._own_parts()]

    def _fetch(self, shards: list[list[jax.Array]]) -> list[OutputBlock]:
        names = self.forward.output_sites
        to_numpy = host_memory.view if self._in_place else np.asarray
        blocks = []
        for part, (number, _) in enumerate(self._own_parts()):
            values: dict[str, np.ndarray] = {}
            for group, stack in zip(names, shards, strict=True):
                values.update(zip(group, to_numpy(stack[part]), strict=True))
            height = next(iter(values.values())).shape[0]
            blocks.append(OutputBlock(number * height, values))
        return blocks


def _load_encoder(encoder: encoders.Encoder, mesh: Mesh, dtype: Any) -> dict[str, jax.Array]:
    """On every device."""
    found = encoders.load(Path(encoder.path))
    everywhere = NamedSharding(mesh, PartitionSpec())
    return {
        name: jax.device_put(found[name].astype(kind), everywhere)
        for name, _, kind in encoders.weight_types(encoder, len(found["W_enc"]), dtype)
    }


def check_jax_version(version: str = jax.__version__) -> None:
    """Raise for a version whose kernels lack what ours use."""
    parts = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if parts < OLDEST_JAX:
        oldest = ".".join(map(str, OLDEST_JAX))
        raise BadInput(f"JAX {version} is too old\n  next: {install_command(f'jax>={oldest}')}")


def open_engine(
    folder: Path,
    site_names: tuple[str, ...],
    *,
    dtype: str,
    architecture: architectures.Architecture | None = None,
    compute: str = "bf16",
    mesh_sizes: Mapping[str, int] | None = None,
    devices: list[Any] | None = None,
    kernel: str | None = None,
    memory: str = "auto",
    packed: bool = False,
    longest: int = 0,
    first_batches: Callable[[Engine], Iterable[Batch]] = lambda engine: (),
    cache: ProgramCache | None = None,
    times: StartTimes | None = None,
    reserve: Sequence[int] = (),
    encoder: encoders.Encoder | None = None,
) -> Engine:
    """Load a model onto `devices`, by default all local ones. `architecture` avoids reading
    config.json again. `packed`: batches may have several samples in a row, each of at most
    `longest` tokens. Programs for `first_batches` are compiled, or taken from `cache`, while the
    weights are read; and host memory for outputs of `reserve` bytes is allocated. `encoder`:
    its latents are returned instead of the only site."""
    check_jax_version()
    dtypes.check_compute_dtype(compute)
    times = times or StartTimes()
    arch = architecture or architectures.from_folder(folder)
    devices = devices or jax.local_devices()
    mesh = meshes.build_mesh(devices, dict(mesh_sizes or {}), arch)
    shaped: dict[str, Any] = {
        "depth": sites.layers_needed(site_names, arch),
        "dtype": kernel_choice.COMPUTE_DTYPES[compute],
        "mesh": mesh,
        "final_norm": sites.final_norm_needed(site_names),
    }
    head = sites.head_needed(site_names)

    def load() -> Mapping[str, Any]:
        with times.measure("weights"):
            params = weights.load_parameters(folder, arch, **shaped, head=head)
            if encoder is not None:
                params["encoder"] = _load_encoder(encoder, mesh, shaped["dtype"])
            return params

    def allocate() -> None:
        with times.measure("memory"):
            host_memory.reserve(mesh, memory, reserve)

    with DaemonThreads(2, "extract-loader") as threads:
        with times.measure("kernels"):
            unavailable, gate_kernel = kernel_choice.choose_kernels(
                arch, compute, mesh, packed=packed, cache=cache
            )
        # Not while kernels are tried, nor while batches run: see `_program`.
        loading = threads.submit(load)
        allocating = threads.submit(allocate)
        forward = decoder.Forward(
            architecture=arch,
            sites=site_names,
            dtype=dtype,
            kernel=kernel,
            unavailable=unavailable,
            gate_kernel=gate_kernel,
            platform=devices[0].platform,
            mesh=mesh,
            longest=longest if sites.has_patterns(site_names) else 0,
            encoder=encoder,
        )
        own_head = weights.has_head(weights.ModelCheckpoint(folder), arch, head)
        abstract = weights.abstract_parameters(arch, **shaped, head=own_head)
        if encoder is not None:
            width = sites.width(encoder.site, arch, longest)
            everywhere = NamedSharding(mesh, PartitionSpec())
            abstract["encoder"] = {
                name: jax.ShapeDtypeStruct(shape, kind, sharding=everywhere)
                for name, shape, kind in encoders.weight_types(encoder, width, shaped["dtype"])
            }
        engine = Engine(forward, abstract, mesh, memory=memory, cache=cache)
        with times.measure("programs"):
            engine.compile_ahead(first_batches(engine))
        engine.params = loading.result()
        allocating.result()
    return engine

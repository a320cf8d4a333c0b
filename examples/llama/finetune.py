"""Fine-tune a LLaMA checkpoint (config.json and *.safetensors) with LoRA.

Each host reads from the files only what its chips hold. The adapter is written in the format of the
PEFT library: adapter_model.safetensors and adapter_config.json.

python tiny_model.py base && python finetune.py base=base    # standalone on a laptop
tpu submit finetune.yaml --follow                            # on a slice
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import model
import numpy as np
import optax
import safetensors
import safetensors.numpy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tpufleet import runtime

SETTINGS = {
    "base": "base",  # folder of the checkpoint
    "data": "",  # a .npy file with one row of token ids per example; empty: made up
    "out": "adapter", "steps": 40, "every": 10, "batch": 16, "length": 32, "lr": 1e-2,
    "rank": 4, "alpha": 8.0, "seed": 0,
}  # fmt: skip
# Our name → name in the checkpoint, whether it is transposed there.
LAYER_NAMES = {
    "attention_norm": ("input_layernorm", False), "mlp_norm": ("post_attention_layernorm", False),
    "wq": ("self_attn.q_proj", True), "wk": ("self_attn.k_proj", True),
    "wv": ("self_attn.v_proj", True), "wo": ("self_attn.o_proj", True),
    "gate": ("mlp.gate_proj", True), "up": ("mlp.up_proj", True), "down": ("mlp.down_proj", True),
}  # fmt: skip
ADAPTED = ("wq", "wv")


def read_config(folder: Path, length: int) -> model.Config:
    plain = json.loads((folder / "config.json").read_text())
    if plain.get("rope_scaling") or plain["model_type"] != "llama":
        sys.exit(f"{folder} is not supported: a plain llama without rope_scaling is")
    heads = plain["num_attention_heads"]
    return model.Config(
        layers=plain["num_hidden_layers"], width=plain["hidden_size"], length=length,
        hidden=plain["intermediate_size"], heads=heads, vocabulary=plain["vocab_size"],
        kv_heads=plain.get("num_key_value_heads", heads),
        head_size=plain.get("head_dim") or plain["hidden_size"] // heads,
        rope_theta=plain.get("rope_theta", 10_000.0), norm_epsilon=plain.get("rms_norm_eps", 1e-6),
    )  # fmt: skip


class Files:
    """The tensors of all *.safetensors in a folder, read in slices."""

    def __init__(self, folder: Path) -> None:
        files = [safetensors.safe_open(path, "flax") for path in folder.glob("*.safetensors")]
        self._by_name = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return f"{name}.weight" in self._by_name

    def read(self, name: str, index: tuple[slice, ...], transposed: bool) -> np.ndarray:
        stored = self._by_name[f"{name}.weight"].get_slice(f"{name}.weight")
        part = np.asarray(stored[index[::-1] if transposed else index], np.float32)
        return part.T if transposed else part


def load(folder: Path, config: model.Config, mesh: jax.sharding.Mesh) -> model.Params:
    files = Files(folder)
    head = "lm_head" if "lm_head" in files else "model.embed_tokens"  # tied
    single = {"embed": ("model.embed_tokens", False), "norm": ("model.norm", False),
              "unembed": (head, True)}  # fmt: skip

    def array(shape: tuple[int, ...], read: Any) -> jax.Array:
        sharding = model.fsdp(mesh, jax.ShapeDtypeStruct(shape, jnp.float32))
        return jax.make_array_from_callback(shape, sharding, read)

    def stacked(index: tuple[slice, ...], name: str) -> np.ndarray:
        theirs, transposed = LAYER_NAMES[name]
        numbers = range(*index[0].indices(config.layers))
        names = [f"model.layers.{number}.{theirs}" for number in numbers]
        return np.stack([files.read(each, index[1:], transposed) for each in names])

    shapes = model.shapes(config)
    params = {
        name: array(shapes[name], lambda index, at=at: files.read(at[0], index, at[1]))
        for name, at in single.items()
    }
    params["layers"] = {
        name: array(shape, partial(stacked, name=name)) for name, shape in shapes["layers"].items()
    }
    return params


def init_adapter(config: model.Config, rank: int, seed: int) -> model.Params:
    """For each adapted product A (random) and B (zero), so that training starts at the base."""
    shapes, adapter = model.shapes(config)["layers"], {}
    for name, key in zip(ADAPTED, jax.random.split(jax.random.key(seed), 2), strict=True):
        layers, inputs, outputs = shapes[name]
        a = jax.random.normal(key, (layers, inputs, rank)) / inputs**0.5
        adapter[name] = {"a": a, "b": jnp.zeros((layers, rank, outputs))}
    return adapter


def merge(base: model.Params, adapter: model.Params, scale: float) -> model.Params:
    layers = dict(base["layers"])
    for name, pair in adapter.items():
        layers[name] = layers[name] + scale * jnp.einsum("lir,lro->lio", pair["a"], pair["b"])
    return {**base, "layers": layers}


def write_adapter(folder: Path, adapter: model.Params, rank: int, alpha: float, base: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, pair in adapter.items():
        for layer in range(len(pair["a"])):
            at = f"base_model.model.model.layers.{layer}.{LAYER_NAMES[name][0]}"
            for part in ("a", "b"):
                value = np.ascontiguousarray(np.asarray(pair[part][layer]).T)
                tensors[f"{at}.lora_{part.upper()}.weight"] = value
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    modules = [LAYER_NAMES[name][0].rpartition(".")[2] for name in ADAPTED]
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
             "r": rank, "lora_alpha": alpha, "target_modules": modules}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(about, indent=2))


def examples(data: str, config: model.Config, seed: int) -> np.ndarray:
    if data:
        return np.load(data, mmap_mode="r")
    rng = np.random.default_rng(seed)
    first = rng.integers(config.vocabulary, size=(256, 1))
    return (first + 3 * np.arange(config.length + 1)) % config.vocabulary


def main(*, base, data, out, steps, every, batch, length, lr, rank, alpha, seed) -> None:
    here = runtime.initialize()
    config, mesh = read_config(Path(base), length), model.make_mesh(here.num_slices)
    params = load(Path(base), config, mesh)
    rows, replicated = NamedSharding(mesh, P(("data", "fsdp"))), NamedSharding(mesh, P())
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    transform = optax.adam(lr)

    def init() -> dict[str, Any]:
        adapter = init_adapter(config, rank, seed)
        return {"adapter": adapter, "moments": transform.init(adapter)}

    state, start = jax.jit(init, out_shardings=replicated)(), 0
    if newest := runtime.checkpoints.latest():  # the adapter is small: process 0 writes it whole
        saved = np.load(newest.part(0) / "state.npz")
        leaves, tree = jax.tree.flatten(state)
        values = [saved[str(index)] for index in range(len(leaves))]
        state = jax.device_put(jax.tree.unflatten(tree, values), replicated)
        start = newest.step

    @partial(jax.jit, donate_argnums=0, out_shardings=replicated)
    def train_step(state: Any, params: model.Params, tokens: jax.Array) -> tuple[Any, jax.Array]:
        def loss_fn(adapter: model.Params) -> jax.Array:
            merged = merge(params, adapter, alpha / rank)
            return jnp.mean(model.losses(merged, tokens, config, dtype))

        loss, gradients = jax.value_and_grad(loss_fn)(state["adapter"])
        updates, moments = transform.update(gradients, state["moments"])
        return {"adapter": optax.apply_updates(state["adapter"], updates), "moments": moments}, loss

    def write(folder: Path) -> None:
        if here.process_id == 0:
            leaves = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
            np.savez(folder / "state.npz", **leaves)

    texts = examples(data, config, seed)
    for step in range(start + 1, steps + 1):
        chosen = np.random.default_rng((seed, step)).integers(len(texts), size=batch)
        tokens = np.asarray(texts[np.sort(chosen), : length + 1], np.int32)
        tokens = jax.make_array_from_callback(tokens.shape, rows, tokens.__getitem__)
        state, loss = train_step(state, params, tokens)
        loss = float(loss)  # waits for the step; see "Simulated slices" in docs/workloads.md
        runtime.progress(step, total=steps, loss=loss)
        stop = runtime.should_stop_together()
        if stop or step % every == 0 or step == steps:
            runtime.checkpoints.save(step, write)
            runtime.checkpoints.prune(keep=2)
        if stop and step < steps:
            sys.exit(f"asked to stop; saved step {step}")  # not 0: the job is not complete
        if step in (1, steps) and here.process_id == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)
    if here.process_id == 0:
        target = Path(out) if here.alone else Path(here.checkpoint_dir, out)
        write_adapter(target, state["adapter"], rank, alpha, base)
        print(f"adapter: {target}", flush=True)


if __name__ == "__main__":
    arguments = dict(argument.split("=", 1) for argument in sys.argv[1:])
    main(**{name: type(value)(arguments.get(name, value)) for name, value in SETTINGS.items()})

"""A packed PyTorch baseline at the same shape: all samples of a batch in one row, without padding,
with PyTorch's own flash attention for variable lengths, as inference servers do. Compiled."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from extract_gpu_shape import SHAPE, TOY, paces

TOKENS = 32768


def lognormal_lengths(tokens: int = TOKENS, *, median: int = 266, sigma: float = 1.2) -> list[int]:
    """Lengths of samples that fill a batch of this many tokens exactly."""
    chance, lengths = np.random.default_rng(0), [0]
    longest = min(2048, tokens // 8)
    while sum(lengths) < tokens:
        lengths.append(int(np.clip(chance.lognormal(np.log(median), sigma), 1, longest)))
    lengths[-1] -= sum(lengths) - tokens
    return [length for length in lengths if length]


def varlen_attention() -> Callable:
    """(query, key, value, starts, longest) -> mixed, causal, heads grouped."""
    import torch

    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        varlen_attn = None

    def attend(query, key, value, starts, longest: int):
        return torch.ops.aten._flash_attention_forward(
            query, key, value, starts, starts, longest, longest, 0.0, True, False
        )[0]

    def public(query, key, value, starts, longest: int):
        return varlen_attn(query, key, value, starts, starts, longest, longest, is_causal=True)

    if varlen_attn is not None:
        query, key = (
            torch.zeros(16, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2)
        )
        starts = torch.tensor([0, 7, 16], device="cuda", dtype=torch.int32)
        try:
            public(query, key, key, starts, 9)
            return public
        except (TypeError, RuntimeError):
            pass  # its arguments differ between versions; the operator below it does not
    return attend


def packed_paces(lengths: list[int]) -> dict[str, float]:
    """Tokens per second of the whole model."""
    import torch
    import torch.nn.functional as F

    hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    heads, kept = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
    dim, layers = hidden // heads, SHAPE["num_hidden_layers"]
    device = torch.device("cuda")

    def random(*shape: int):
        return torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02

    embed = random(SHAPE["vocab_size"], hidden)
    weights = [
        {
            "qkv": random((heads + 2 * kept) * dim, hidden),
            "bias": random((heads + 2 * kept) * dim),
            "out": random(hidden, hidden),
            "gate_up": random(2 * inner, hidden),
            "down": random(hidden, inner),
            "norms": torch.ones(2, hidden, device=device, dtype=torch.bfloat16),
        }
        for _ in range(layers)
    ]
    attend = varlen_attention()
    longest = max(lengths)
    starts = torch.tensor(np.cumsum([0, *lengths]), device=device, dtype=torch.int32)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    tokens = torch.randint(0, SHAPE["vocab_size"], (sum(lengths),), device=device)
    rates = 1.0 / SHAPE["rope_theta"] ** (torch.arange(0, dim, 2, device=device) / dim)
    angles = positions[:, None].float() * rates
    cosine, sine = (part[:, None] for part in (angles.cos(), angles.sin()))

    def rotate(values):
        left, right = values.float().chunk(2, dim=-1)
        turned = torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)
        return turned.to(torch.bfloat16)

    def layer(stream, weight):
        normed = F.rms_norm(stream, (hidden,), weight["norms"][0], 1e-6)
        mixed = F.linear(normed, weight["qkv"], weight["bias"]).view(-1, heads + 2 * kept, dim)
        query, key, value = mixed.split([heads, kept, kept], dim=1)
        value = value.contiguous()
        mixed = attend(rotate(query), rotate(key), value, starts, longest)
        stream = stream + F.linear(mixed.reshape(-1, hidden), weight["out"])
        normed = F.rms_norm(stream, (hidden,), weight["norms"][1], 1e-6)
        gate, up = F.linear(normed, weight["gate_up"]).chunk(2, dim=-1)
        return stream + F.linear(F.silu(gate) * up, weight["down"])

    run = layer if TOY else torch.compile(layer)

    def step() -> None:
        with torch.inference_mode():
            stream = F.embedding(tokens, embed)
            for weight in weights:
                stream = run(stream, weight)

    times = paces(step, lambda _: torch.cuda.synchronize())
    return {name: sum(lengths) / seconds for name, seconds in times.items()}

"""What PyTorch and transformers reach at the same shape: forward eager and compiled, 24 layers into
page-locked memory with copies beside the compute, and the product of two large matrices."""

from __future__ import annotations

from collections.abc import Callable

from extract_gpu_shape import LENGTH, ROWS, SHAPE, SIDE, WIDTH, emit, median_seconds, paces
from extract_gpu_torch_packed import lognormal_lengths, packed_paces


def torch_lines() -> dict:
    import torch
    import transformers

    results: dict = {"matrix": matrix_paces()}
    emit(results)
    options = {key: value for key, value in SHAPE.items() if key != "model_type"}
    config = transformers.Qwen2Config(**options, use_cache=False, attn_implementation="sdpa")
    with torch.device("cuda"):
        model = transformers.Qwen2Model(config).to(torch.bfloat16).eval()
    tokens = torch.randint(0, SHAPE["vocab_size"], (ROWS, LENGTH), device="cuda")

    def forward(run: Callable) -> dict[str, float]:
        def step() -> None:
            with torch.inference_mode():
                run(input_ids=tokens, use_cache=False)

        results = paces(step, lambda _: torch.cuda.synchronize())
        return {name: ROWS * LENGTH / seconds for name, seconds in results.items()}

    results["eager"] = forward(model)
    emit(results)
    results["24_layers_pinned"] = pinned(model, tokens)
    emit(results)
    results["compiled"] = forward(torch.compile(model))
    emit(results)
    results["packed_ragged"] = packed_paces(lognormal_lengths())
    emit(results)
    results["packed_fixed"] = packed_paces([LENGTH] * ROWS)
    return results


def matrix_paces() -> dict[str, float]:
    """TFLOP/s of the product of two large matrices."""
    import torch

    left, right = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    results = paces(lambda: torch.matmul(left, right), lambda _: torch.cuda.synchronize())
    return {name: 2 * SIDE**3 / seconds / 1e12 for name, seconds in results.items()}


def pinned(run: Callable, tokens, steps: int = 6) -> float:
    import torch

    shape = (24, ROWS, LENGTH, WIDTH)
    buffers = [torch.empty(shape, dtype=torch.bfloat16, pin_memory=True) for _ in range(2)]
    side, turn = torch.cuda.Stream(), [0]

    def action() -> None:
        with torch.inference_mode():
            for _ in range(steps):
                states = run(
                    input_ids=tokens, use_cache=False, output_hidden_states=True
                ).hidden_states
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for layer in range(24):
                        states[layer + 1].record_stream(side)
                        buffers[turn[0]][layer].copy_(states[layer + 1], non_blocking=True)
                turn[0] ^= 1
        torch.cuda.synchronize()

    return steps * ROWS * LENGTH / median_seconds(action, warm=1, repeat=2)

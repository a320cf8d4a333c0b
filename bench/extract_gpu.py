"""Extraction on one GPU against PyTorch and the chip's matrix limit, in one call of ten minutes.

    python bench/extract_gpu.py [--seconds 640] [--only ragged shapes] [--out results.json]

Qwen2.5-0.5B shape, random weights, sequences of 2,048. Every measurement is a process of its own
with a time limit, so one that fails costs one line. Prints a table with what limits each line,
then JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import extract_gpu_files as files
import extract_gpu_ours as ours
import extract_gpu_ragged as ragged
import extract_gpu_torch as torch_side
import extract_streams as streams
import reporting
from extract_gpu_shape import WORK, emit

ROOT = Path(__file__).resolve().parent.parent
# Tried for the forward pass, beside XLA's own choice, when time is left.
FLAGS = {
    "no-triton": "--xla_gpu_enable_triton_gemm=false",
    "no-command-buffers": "--xla_gpu_enable_command_buffer=",
    "latency-hiding": "--xla_gpu_enable_latency_hiding_scheduler=true",
}
# Seconds that each measurement may take, in the order of their worth.
LIMITS = {
    "forward": 90,
    "ragged": 200,
    "disk_1": 80,
    "shapes": 100,
    "host_24": 60,
    "torch": 110,
    "disk_4": 90,
    "stream": 60,
    "writers": 40,
}
CHILDREN = {
    "torch": torch_side.torch_lines,
    "forward": ours.forward_only,
    "disk_1": ours.disk_1,
    "disk_4": ours.disk_4,
    "stream": streams.stream_1,
    "host_24": ours.host_24,
    "writers": files.writers,
    "ragged": ragged.ragged,
    "shapes": ragged.shapes,
}


def child(name: str, seconds: float, flags: str = "") -> dict:
    cache = Path(tempfile.gettempdir()) / "tpufleet-bench-cache"
    sources = map(str, sorted(ROOT.glob("packages/*/src")))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    began = time.monotonic()
    try:
        result = subprocess.run(
            [sys.executable, __file__, "--child", name],
            env=environment,
            capture_output=True,
            text=True,
            timeout=max(seconds, 5),
        )
        text, fault = result.stdout, result.stderr if result.returncode else ""
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode(errors="replace")
        fault = f"stopped after {seconds:.0f} s"
    facts = [line[6:] for line in text.splitlines() if line.startswith("FACTS ")]
    results = json.loads(facts[-1]) if facts else {}
    if fault:
        results["error"] = fault.strip()[-1200:]
    results["took"] = round(time.monotonic() - began, 1)
    print(f"# {name} {flags}: {json.dumps(results)}", flush=True)
    return results


def lines(results: dict) -> list[dict]:
    """What was reached, what it is compared with, and what limits it. Rates are lasting ones,
    unless a line says that the chip rested before."""
    torch, best = results.get("torch", {}), results.get("forward", {})
    peer = _most(*(_at(torch, way, "lasting") for way in ("eager", "compiled")))
    forward = _at(best, "lasting", "tokens_per_second")
    host, pen = results.get("host_24", {}), results.get("writers", {})
    table: list[tuple] = []
    table.append(("forward tokens/s against PyTorch's best", forward, peer, 1.0, "ratio", ""))
    for pace, suffix in (("lasting", ""), ("rested", " after a rest")):
        limit = _most(*(_at(side, "matrix", pace) for side in (torch, best)))
        flagged = [_at(results.get(f"forward {name}", {}), pace, "tflops") for name in FLAGS]
        reached = _at(best, pace, "tflops")
        chip = "attention and what moves memory run below the rate of matrix products"
        name = f"forward TFLOP/s{suffix} against matrices"
        table.append((name, reached, limit, 0.75, "ratio", chip))
        if any(flagged):
            name = f"the same{suffix} with the best XLA flags"
            table.append((name, _most(reached, *flagged), limit, 0.75, "ratio", ""))
    for number, goal, judged in ((1, 600_000, "ours"), (4, 1.0, "ratio")):
        for place, label in (("disk", "disk"), ("memory", "memory files")):
            run = results.get(f"disk_{number}", {})
            rate, why = _piped(run, place)
            layers = f"{number} layer{'s' * (number > 1)} to {label}"
            table.append((f"{layers}, tokens/s", rate, peer, goal, judged, why))
            if number == 1:
                alone = _at(run, place, "forward_alone")
                table.append((f"{layers} against our forward", rate, alone, 0.9, "ratio", ""))
    stream = results.get("stream", {})
    for kind in ("shared memory", "tcp"):
        name = f"1 layer to a reader by {kind}, tokens/s against a run that keeps nothing"
        table.append((name, stream.get(kind), stream.get("nothing"), 0.9, "ratio", ""))
    table += _ragged_lines(results)
    moved = f"{host.get('bytes_per_second', 0) / 1e9:.1f} GB/s to the host; " + (
        f"without bringing them over {host.get('computed', 0):,.0f}"
    )
    raw, zstd = (pen.get(f"{kind}_bytes_per_second") for kind in ("raw", "zstd"))
    gzip_rate, absent = pen.get("gzip_pickle_bytes_per_second"), pen.get("zstd", "")
    landed, pinned = host.get("arrays"), torch.get("24_layers_pinned")
    table += [
        ("24 layers to host memory, tokens/s", landed, pinned, 500_000, "ours", moved),
        ("write raw shards, bytes/s, durable", raw, gzip_rate, 1e9, "ours", "the disk"),
        ("write zstd shards, bytes/s, durable", zstd, gzip_rate, 10.0, "ratio", absent),
    ]
    return [_judged(*row) for row in table]


def _ragged_lines(results: dict) -> list[tuple]:
    """Samples of many lengths, whole commands; and other models."""
    run, table = results.get("ragged", {}), []
    packed = _at(results.get("torch", {}), "packed_ragged", "lasting")
    for name, label, goal in (
        ("first", "ragged, 1 layer to disk, first run", 350_000),
        ("second", "ragged, 1 layer to disk, second run", 600_000),
        ("memory_4", "ragged, 4 layers to memory files", 600_000),
    ):
        facts = run.get(name, {})
        why = run.get(f"{name}_error", run.get("error", ""))
        if facts:
            rates = ", ".join(f"{rate:,}" for rate in facts["device_rates"].values())
            device = f"the device alone {rates or 'not measured'}"
            why = f"{facts['limit']}; {device}; start {facts['start']}"
        rate = facts.get("tokens_per_second")
        table.append((f"{label}, tokens/s", rate, packed, goal, "ours", why))
        whole = facts.get("tokens_per_second_command")
        table.append(("  the same with start and compiling", whole, None, goal, "ours", ""))
    facts = run.get("memory_4", {})
    written = facts["gigabytes"] * 1e9 / facts["seconds"] if facts else None
    name = "the same, bytes/s against plain writing"
    table.append((name, written, run.get("memory_limit"), 0.9, "ratio", ""))
    ours = _at(results.get("shapes", {}), "packed_ragged", "lasting")
    name = "packed forward, ragged, tokens/s against PyTorch"
    table.append((name, ours, packed, 1.0, "ratio", "PyTorch: varlen flash attention, compiled"))
    shapes = results.get("shapes", {})
    limit = _at(shapes, "matrix", "lasting")
    for name, goal in (("gemma-2-2b", 0.75), ("qwen2.5-7b", 0.95)):
        reached = _at(shapes, name, "lasting", "tflops")
        why = shapes.get(f"{name}_error", "")
        table.append((f"{name}: TFLOP/s against matrices", reached, limit, goal, "ratio", why))
    return table


def _at(facts: dict, *path: str) -> float | None:
    for name in path:
        facts = facts.get(name) or {}
    return facts or None


def _most(*values: float | None) -> float | None:
    return max(filter(None, values), default=None)


def _piped(run: dict, place: str) -> tuple[float | None, str]:
    facts, ceiling = run.get(place, {}), run.get(f"{place}_limit", 0.0)
    if not facts:
        return None, run.get(f"{place}_error", run.get("error", ""))
    written = f"{facts['bytes_per_second'] / 1e9:.2f} of {ceiling / 1e9:.2f} GB/s plain writing"
    return facts["tokens_per_second"], f"{facts['limit']}; {written}"


def _judged(
    name: str, ours: float | None, anchor: float | None, goal: float, judged: str, why: str
) -> dict:
    ratio = ours / anchor if ours and anchor else None
    value = ours if judged == "ours" else ratio
    met = None if value is None else value >= goal
    return {
        "name": name,
        "ours": ours,
        "anchor": anchor,
        "ratio": ratio,
        "goal": goal,
        "met": met,
        "limited_by": why,
    }


def show(rows: list[dict]) -> None:
    print(f"\n{'':44}{'ours':>16}{'anchor':>16}{'ratio':>9}{'goal':>12}  met")
    for row in rows:
        cells = [
            f"{row[key]:>{width},.2f}" if row[key] is not None else f"{'-':>{width}}"
            for key, width in (("ours", 16), ("anchor", 16), ("ratio", 9), ("goal", 12))
        ]
        print(f"{row['name']:44}{''.join(cells)}  {row['met']}")
        if row["limited_by"]:
            print(f"    limited by: {row['limited_by']}")
    print(WORK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", choices=sorted(CHILDREN))
    parser.add_argument("--seconds", type=float, default=640.0)
    parser.add_argument("--only", nargs="+", choices=sorted(CHILDREN), help="these measurements")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--merge", type=Path, help="--out of an earlier call, for its lines")
    arguments = parser.parse_args()
    if arguments.child:
        emit(CHILDREN[arguments.child]())
        return
    deadline = time.monotonic() + arguments.seconds
    left = lambda: deadline - time.monotonic()
    earlier = arguments.merge.read_text() if arguments.merge else '{"facts": {}}'
    results: dict = json.loads(earlier)["facts"]
    for name, limit in LIMITS.items():
        if left() > 15 and name in (arguments.only or LIMITS):
            results[name] = child(name, min(limit, left() - 5))
    # With the time that is left: do other choices of the compiler run faster?
    for name, flags in FLAGS.items():
        if left() > 45 and not arguments.only:
            results[f"forward {name}"] = child("forward", left() - 5, flags)
    rows = lines(results)
    show(rows)
    for row in rows:
        print(json.dumps(row))
    if arguments.out:
        facts = {"work": WORK, "lines": rows, "facts": results}
        arguments.out.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    reporting.run_benchmark(main)

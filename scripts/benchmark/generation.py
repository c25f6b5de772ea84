"""Benchmark of our generation engine against others, with the same random weights, prompts and response lengths.

    python scripts/benchmark/generation.py
    python scripts/benchmark/generation.py --models tiny --batch 64 --lengths lognormal:128,constant:64 --json out.jsonl
    python scripts/benchmark/generation.py --without sharing,compaction,kernels,sharing+kernels

README.md in this folder explains what is measured and how to read the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch reads it on import. Only one contender runs at a time, so its threads may spin while waiting.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import torch  # noqa: E402
import transformers  # noqa: E402
from contender import Contender, Setting, one_line  # noqa: E402
from contenders import CONTENDERS, equal_greedy_tokens, ours  # noqa: E402
from measure import available_bytes, copy_bandwidth, free_memory  # noqa: E402
from rounds import Result, measure_case, progress  # noqa: E402
from shapes import (  # noqa: E402
    DTYPES,
    SHAPES,
    Case,
    LengthKind,
    PromptKind,
    bandwidth_limit,
    kv_bytes_per_token,
    make_case,
    needed_bytes,
    random_model,
    weight_bytes,
)
from table import greedy_line, table  # noqa: E402
from vllm_colocated import ColocatedVLLM  # noqa: E402
from vllm_process import VLLMProcess  # noqa: E402

from dschat.generation.decoder import OPTIMIZATIONS  # noqa: E402

# Defaults: flag → value, per device type.
DEFAULTS = {
    "cpu": {"models": "tiny,smollm2", "prompts": "16-32,512x8", "max_new": 64},
    "cuda": {
        "models": "qwen2.5-0.5b,qwen2.5-1.5b,opt-1.3b,llama-3-8b", "prompts": "16-32,512x8", "max_new": 128,
        "batch": "1,8,32,128,512", "lengths": "constant,lognormal",
    },
}  # fmt: skip
CPU_CASES = {"tiny": {"batch": "64", "lengths": "lognormal:128,constant:64"}}
OTHER_CPU_CASES = {"batch": "32", "lengths": "lognormal,constant"}


def measure_model(options: argparse.Namespace, name: str, bandwidth: float) -> Iterator[dict]:
    """Run all cases of a model; yields a row for each contender and case."""
    device, dtype = options.device, DTYPES[options.dtype]
    model = random_model(name, dtype=dtype, device=device, seed=options.seed)
    vocabulary, kv = model.config.vocab_size, kv_bytes_per_token(model.config, dtype)
    cases = [make_case(*parts, vocabulary=vocabulary, seed=options.seed) for parts in product(*plan(options, name))]
    with contextlib.ExitStack() as stack:
        setting = Setting(
            model, device, options.seed, cache(partial(start_vllm, options, model, cases, stack)),
            cache(partial(ColocatedVLLM.start, model, cases, kv_bytes=vllm_cache_bytes(cases, kv), seed=options.seed)),
        )  # fmt: skip
        for case in cases:
            title = f"{name} {case.batch} {case.prompt_kind} {case.length_kind}"
            needed, available = needed_bytes(case, kv=kv, vocabulary=vocabulary), available_bytes(device)
            equal: tuple[int, int] | str = "not checked"
            if needed > available:
                failure = f"needs about {needed / 2**30:.1f} GiB, and {available / 2**30:.1f} are free"
                results = [Result(label, failure=failure) for label in options.contenders]
            else:
                if options.verify:
                    progress(f"{title}: greedy tokens in float32")
                    try:
                        equal = equal_greedy_tokens(model, case)
                    except Exception as error:
                        equal = one_line(error)
                    free_memory(device)
                progress(title)
                results = measure_case(setting, case, options.contenders, repeat=options.repeat)
            limit = bandwidth_limit(case, weights=weight_bytes(model), kv=kv, bandwidth=bandwidth)
            for result in results:
                yield row(options, name, case, result, limit=limit, bandwidth=bandwidth, equal=equal)


def row(
    options: argparse.Namespace, model: str, case: Case, result: Result, *, limit: float, bandwidth: float,
    equal: tuple[int, int] | str,
) -> dict:  # fmt: skip
    """A line of the JSON file."""
    rate = None if result.median is None else case.tokens / result.median
    return {
        "model": model, "dtype": options.dtype, "device": options.device_name, "threads": options.threads,
        "batch": case.batch, "prompts": str(case.prompt_kind), "lengths": str(case.length_kind),
        "contender": result.contender, "tokens": case.tokens, "tokens_per_second": rate,
        "best_tokens_per_second": None if rate is None else case.tokens / min(result.seconds),
        "percent_of_bandwidth": None if rate is None else 100 * rate / limit,
        "peak_bytes": None if rate is None else result.peak_bytes, "warmup_seconds": result.warmup_seconds,
        "seconds": result.seconds, "bandwidth": bandwidth, "equal_greedy_tokens": equal,
        "note": result.failure or result.note,
    }  # fmt: skip


def start_vllm(
    options: argparse.Namespace, model: transformers.PreTrainedModel, cases: list[Case], stack: contextlib.ExitStack
) -> VLLMProcess:
    """Save the weights and start vLLM with them, sized for the largest case; the stack closes it."""
    if not options.vllm_python:
        raise RuntimeError("--vllm_python is not given")
    if not Path(options.vllm_python).exists():
        raise RuntimeError(f"--vllm_python {options.vllm_python} does not exist")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm_benchmark_")))
    model.save_pretrained(folder / "model")
    kv = kv_bytes_per_token(model.config, model.dtype)
    settings: dict[str, object] = {
        "model": str(folder / "model"), "dtype": str(model.dtype).removeprefix("torch."), "seed": options.seed,
        "max_model_len": max(case.columns for case in cases), "max_num_seqs": max(case.batch for case in cases),
        "kv_cache_memory_bytes": vllm_cache_bytes(cases, kv),
    }  # fmt: skip
    free = 0
    if options.device.type == "cuda":
        free_memory(options.device)
        free, total = torch.cuda.mem_get_info(options.device)
        settings["gpu_memory_utilization"] = 0.9 * free / total
    progress("vllm: starting")
    process = VLLMProcess(options.vllm_python, threads=options.threads, log=folder / "log", **settings)
    stack.callback(process.close)
    if options.device.type == "cuda":
        process.device_bytes = free - torch.cuda.mem_get_info(options.device)[0]
    return process


def vllm_cache_bytes(cases: list[Case], kv: int) -> int:
    """Per row, two blocks (of at most 128 tokens) more than its tokens take, for partially filled ones."""
    return max(case.batch * (case.columns + 256) for case in cases) * kv


def plan(options: argparse.Namespace, model: str) -> tuple[list[int], list[PromptKind], list[LengthKind]]:
    """Batches, prompts and lengths of a model; its cases are their product."""
    fallback = CPU_CASES.get(model, OTHER_CPU_CASES)
    return (
        [int(word) for word in (options.batch or fallback["batch"]).split(",")],
        [PromptKind.parse(word) for word in options.prompts.split(",")],
        [LengthKind.parse(word, options.max_new) for word in (options.lengths or fallback["lengths"]).split(",")],
    )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options, with the device's defaults; contenders by name. All mistakes are reported together."""
    parser = argument_parser()
    options = parser.parse_args(argv)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    defaults = DEFAULTS.get(device.partition(":")[0])
    if defaults is None:
        parser.error(f"--device {device} is neither cpu nor cuda")
    options.device = torch.device(device)
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.models = options.models.split(",")
    problems = case_problems(options)
    options.contenders, unknown = chosen_contenders(options)
    problems += unknown
    problems += [f"--repeat {options.repeat} must be at least 1"] if options.repeat < 1 else []
    if problems:
        parser.error("; ".join(problems))
    return options


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", metavar="A,B", help=f"of {', '.join(SHAPES)} (default: by device)")
    add("--batch", metavar="N,N", help="rows of a rollout (default: by device and model)")
    add(
        "--prompts",
        metavar="KIND,KIND",
        help="token counts LOW-HIGH or N, with xS for S responses a prompt: 16-32,512x8",
    )
    add("--lengths", metavar="KIND,KIND", help="constant[:N] or lognormal[:N], N the longest (default: --max_new)")
    add("--max_new", type=int, metavar="N", help="longest response if --lengths has no N")
    add("--contenders", metavar="A,B", default=",".join(CONTENDERS), help="default: %(default)s")
    choices = ", ".join(sorted(OPTIMIZATIONS))
    add("--without", metavar="PARTS,PARTS", default="", help=f"also ours without {choices}; a+b: both")
    add("--repeat", type=int, default=3, metavar="N", help="turns of each contender after its warm-up (default: 3)")
    add("--dtype", choices=DTYPES, default="bf16")
    add("--device", help="cpu or cuda (default: cuda if available)")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="default: all cores")
    add("--seed", type=int, default=0)
    add("--verify", action=argparse.BooleanOptionalAction, default=True, help="compare greedy tokens in float32 first")
    add("--vllm_python", metavar="PATH", help="interpreter of the environment that vLLM is installed in")
    add("--json", type=Path, metavar="PATH", help="write a JSON row for each contender and case")
    return parser


def case_problems(options: argparse.Namespace) -> list[str]:
    """Unknown models, and sizes that make no case."""
    problems = [f"--models {name}: not one of {', '.join(SHAPES)}" for name in options.models if name not in SHAPES]
    try:
        sizes = [size for model in options.models for size in plan(options, model)[0]]
        problems += [f"--batch {size} must be at least 1" for size in sizes if size < 1]
    except ValueError as error:
        problems.append(f"--batch, --prompts or --lengths: {error}")
    return problems


def chosen_contenders(options: argparse.Namespace) -> tuple[dict[str, Contender], list[str]]:
    """The contenders of --contenders and --without by name, and a line for each unknown name."""
    names = options.contenders.split(",")
    problems = [f"--contenders {name}: not one of {', '.join(CONTENDERS)}" for name in names if name not in CONTENDERS]
    contenders = {name: CONTENDERS[name] for name in names if name in CONTENDERS}
    for combination in filter(None, options.without.split(",")):
        parts = combination.split("+")
        unknown = [part for part in parts if part not in OPTIMIZATIONS]
        problems += [f"--without {part}: not one of {', '.join(sorted(OPTIMIZATIONS))}" for part in unknown]
        contenders[f"ours -{combination}"] = partial(ours, without=frozenset(parts))
    return contenders, problems


def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that vLLM is stopped too
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    cuda = options.device.type == "cuda"
    options.device_name = torch.cuda.get_device_name(options.device) if cuda else "cpu"
    bandwidth = copy_bandwidth(options.device)
    print(
        f"{options.device_name}, {options.threads} threads, {options.dtype}; torch {torch.__version__}, transformers "
        f"{transformers.__version__}; copies move {bandwidth / 1e9:,.1f} GB/s; median of {options.repeat} turns"
    )
    if options.json:
        options.json.write_text("")
    for name in options.models:
        rows = []
        try:
            for measured in measure_model(options, name, bandwidth):
                rows.append(measured)
                if options.json:
                    with options.json.open("a") as file:
                        file.write(json.dumps(measured) + "\n")
        except torch.OutOfMemoryError as error:
            print(f"\n{name}: {one_line(error)}")
        if rows:
            print(f"\n{name}\n{table(rows)}\n{greedy_line(rows)}", flush=True)
        free_memory(options.device)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""Benchmark of training throughput against the suite's own plain path and against TRL, on the same random models.

    python scripts/benchmark/training.py
    python scripts/benchmark/training.py --models tiny --kinds sft,grpo --trl_python ~/trl/bin/python --json out.jsonl
    python scripts/benchmark/training.py --contenders ours --without packing,sharing,packing+sharing

README.md in this folder explains what is measured and how to read the table.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # this process waits while a contender computes

import torch  # noqa: E402
import transformers  # noqa: E402
from rounds import progress  # noqa: E402
from shapes import DTYPES, SHAPES  # noqa: E402
from training_cases import (  # noqa: E402
    DEFAULT_LENGTHS,
    KINDS,
    NAMED,
    RL,
    Lengths,
    Sizes,
    make_rows,
    prompt_tokens,
    samples_per_prompt,
    sequence_lengths,
)
from training_contenders import CONTENDERS, PARTS, chosen_contenders  # noqa: E402
from training_flops import ModelShape, peak_flops, shape_of, training_flop  # noqa: E402
from training_models import has_attention_bias, save_model  # noqa: E402
from training_rounds import TrainingResult, measure_training  # noqa: E402
from training_table import training_table  # noqa: E402

TOKENS_PER_TURN = {"tiny": 8192}  # about; other models run one optimizer step per turn


def measure_model(options: argparse.Namespace, name: str, peak: float) -> Iterator[dict]:
    """Run all cases of a model; yields a row for each contender and case."""
    shape = shape_of(SHAPES[name]())
    for kind, lengths in plan(options):
        with tempfile.TemporaryDirectory(prefix="training_benchmark_") as directory:
            progress(f"{name} {kind} {lengths.name}")
            folder = Path(directory)
            case = make_case(options, name, kind, lengths, folder / "model")
            starts = {
                label: partial(
                    contender.start, case, folder / label, threads=options.threads, trl_python=options.trl_python
                )
                for label, contender in options.contenders.items()
                if kind in contender.kinds
            }
            for result in measure_training(starts, turns=options.turns, tokens=case["tokens"]):
                yield row(options, name, case, result, shape=shape, peak=peak)


def make_case(options: argparse.Namespace, name: str, kind: str, lengths: Lengths, folder: Path) -> dict:
    """Save the model of a case, and describe the work of one turn, the same for all contenders."""
    steps = round(TOKENS_PER_TURN.get(name, 0) / (options.sequences * lengths.mean_tokens))
    sizes = Sizes(options.sequences, options.micro_batch, options.steps or max(1, steps))
    config = SHAPES[name]()
    save_model(
        name, folder, dtype=DTYPES[options.dtype], seed=options.seed,
        eos_probability=lengths.eos_probability if kind in RL else None,
    )  # fmt: skip
    rows = make_rows(kind, lengths, sizes, vocabulary=config.vocab_size, seed=options.seed)
    prompts = prompt_tokens(kind, lengths, rows)
    if kind not in RL:
        tokens = sum(sequence_lengths(rows))
    else:  # None: sampled
        responses = sizes.sequences * sizes.steps * lengths.longest
        tokens = None if lengths.eos_probability else prompts + responses
    return {
        "kind": kind, "lengths": lengths.name, "model": str(folder), "dtype": options.dtype,
        "device": options.device.type, "seed": options.seed, **vars(sizes), "rows": rows, "prompt_tokens": prompts,
        "tokens": tokens, "samples": samples_per_prompt(kind, lengths), "longest": lengths.longest,
        "columns": lengths.prompt.longest + lengths.longest, "learning_rate": options.learning_rate,
        "kl_coef": options.kl_coef, "zero_stage": options.zero_stage,
    }  # fmt: skip


def row(
    options: argparse.Namespace, model: str, case: dict, result: TrainingResult, *, shape: ModelShape, peak: float
) -> dict:
    """A line of the JSON file."""
    flop = partial(
        training_flop, shape, case["kind"], prompt_tokens=case["prompt_tokens"], with_reference=options.kl_coef > 0
    )
    return {
        "kind": case["kind"], "model": model, "dtype": options.dtype, "lengths": case["lengths"],
        "contender": result.contender, "tokens_per_second": result.median(lambda turn: turn.tokens / turn.seconds),
        "samples_per_second": result.median(lambda turn: len(turn.lengths) / turn.seconds),
        "peak_bytes": result.peak_bytes, "mfu": result.median(lambda turn: flop(turn.lengths) / turn.seconds / peak),
        "seconds": result.median(lambda turn: turn.seconds), "tokens": result.median(lambda turn: turn.tokens),
        "turns": [turn.seconds for turn in result.turns], "device": options.device_name, "threads": options.threads,
        "sequences": case["sequences"], "micro_batch": case["micro_batch"], "steps": case["steps"], "peak_flops": peak,
        "note": result.failure or result.note,
    }  # fmt: skip


def plan(options: argparse.Namespace) -> list[tuple[str, Lengths]]:
    """The cases of every model: kinds with lengths that fit them. Raises ValueError for lengths that are none."""
    cases = [
        (kind, Lengths.parse(name, kind))
        for kind in options.kinds
        for name in (options.lengths or DEFAULT_LENGTHS[kind]).split(",")
    ]
    return [(kind, lengths) for kind, lengths in cases if lengths.fits(kind)]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options; contenders by name. All mistakes are reported together."""
    parser = argument_parser()
    options = parser.parse_args(argv)
    options.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options.models, options.kinds = options.models.split(","), options.kinds.split(",")
    problems = [f"--models {name}: not one of {', '.join(SHAPES)}" for name in options.models if name not in SHAPES]
    problems += [f"--kinds {kind}: not one of {', '.join(KINDS)}" for kind in options.kinds if kind not in KINDS]
    problems += Sizes(options.sequences, options.micro_batch, 1 if options.steps is None else options.steps).problems()
    problems += [] if options.turns > 0 else [f"--turns {options.turns} must be at least 1"]
    if not problems:
        problems += case_problems(options)
    options.contenders, unknown = chosen_contenders(
        options.contenders, without=options.without, with_parts=options.with_parts, checkout=options.checkout
    )
    if problems + unknown:
        parser.error("; ".join(problems + unknown))
    return options


def case_problems(options: argparse.Namespace) -> list[str]:
    """Lengths that are none or fit no kind, and models that cannot run the RL kinds."""
    try:
        cases = plan(options)
    except ValueError as error:
        return [f"--lengths {error}"]
    problems = [
        f"--kinds {kind}: its responses are sampled, so their lengths are constant or geometric, not {options.lengths}"
        for kind in options.kinds
        if kind not in {case[0] for case in cases}
    ]
    for name in options.models:
        positions = getattr(SHAPES[name](), "max_position_embeddings", None) or 2**31
        longest = max((lengths.prompt.longest + lengths.longest for _, lengths in cases), default=0)
        if longest > positions:
            problems.append(f"--lengths: {longest} tokens, but {name} has {positions} positions")
        if set(options.kinds) & set(RL) and not has_attention_bias(SHAPES[name]()):
            problems.append(f"--models {name}: the chance of EOS can be fixed in Llama shapes only, for grpo and ppo")
    return problems


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", metavar="A,B", default="tiny,smollm2", help=f"of {', '.join(SHAPES)} (default: %(default)s)")
    add("--kinds", metavar="A,B", default=",".join(KINDS), help="default: %(default)s")
    add(
        "--lengths",
        metavar="A,B",
        help=f"{', '.join(NAMED)}, or [PROMPT/]constant:N, lognormal:MAX, geometric:MAX, uniform:LOW-HIGH; a prompt is "
        "N, LOW-HIGH, or NxS for S rows that share one; a kind takes those that fit it (default: by kind)",
    )
    add("--contenders", metavar="A,B", default=",".join(CONTENDERS), help="default: %(default)s")
    add("--without", metavar="PARTS,PARTS", default="", help=f"also ours without {', '.join(PARTS)}; a+b: both")
    add("--with", metavar="PARTS,PARTS", default="", dest="with_parts", help="also ours with these parts, if they are "
        "not on by default")  # fmt: skip
    add("--checkout", metavar="PATH", help="also ours of another checkout of this suite, such as an earlier commit")
    add("--turns", type=int, default=3, metavar="N", help="turns of each contender after its warm-up (default: 3)")
    add("--steps", type=int, metavar="N", help="optimizer steps per turn (default: tiny about 8192 tokens, others 1)")
    add("--sequences", type=int, default=64, metavar="N", help="sequences per optimizer step (default: 64)")
    add("--micro_batch", type=int, default=16, metavar="N", help="sequences per forward pass (default: 16)")
    add("--dtype", choices=DTYPES, default="bf16")
    add("--device", help="cpu or cuda (default: cuda if available)")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="default: all cores")
    add("--seed", type=int, default=0)
    add("--learning_rate", type=float, default=1e-6)
    add("--kl_coef", type=float, default=0.04, help="of grpo and ppo; 0: no reference model (default: 0.04)")
    add("--zero_stage", type=int, default=2, choices=range(4), help="of ours (default: 2, as the programs)")
    add("--trl_python", metavar="PATH", help="interpreter of the environment that TRL is installed in")
    add("--json", type=Path, metavar="PATH", help="write a JSON row for each contender and case")
    return parser


def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the workers are stopped too
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    cuda = options.device.type == "cuda"
    options.device_name = torch.cuda.get_device_name(options.device) if cuda else "cpu"
    peak = peak_flops(options.device, DTYPES[options.dtype])
    print(
        f"{options.device_name}, {options.threads} threads, {options.dtype}; torch {torch.__version__}, transformers "
        f"{transformers.__version__}; matrix products reach {peak / 1e9:,.0f} GFLOP/s; {options.sequences} sequences "
        f"per step, {options.micro_batch} per forward pass; median of {options.turns} turns"
    )
    if options.json:
        options.json.write_text("")
    for name in options.models:
        rows = []
        try:
            for measured in measure_model(options, name, peak):
                rows.append(measured)
                if options.json:
                    with options.json.open("a") as file:
                        file.write(json.dumps(measured) + "\n")
        finally:  # also what an interrupted run has measured
            if rows:
                print(f"\n{name}\n{training_table(rows)}", flush=True)


if __name__ == "__main__":
    main()

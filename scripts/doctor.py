"""Check whether a rollout engine samples from the model that is trained, on this machine.

    python scripts/doctor.py OUTPUT_DIR [--rollout_engine vllm] [--dtype bf16] [--temperature 0.7 --top_p 0.9]

Generates greedy and sampled responses, changes the weights as an update would, lets the engine load them, generates
again, and compares every log-prob with the model's own forward pass. The verdict names the cause of a difference: stale
weights (and which layer), the sampling distribution, a scale, positions, adapters, or the chat template. Exit status: 0
if they agree up to rounding, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from transformers import PreTrainedTokenizerBase

from dschat.arguments import RolloutArguments, VLLMArguments
from dschat.arguments.command_line import SettingsError
from dschat.arguments.models import TRUST_HELP
from dschat.arguments.script_inputs import SEEDS, exit_on_mistake, number_type
from dschat.data.chat_template import encode_prompt, stop_token_ids
from dschat.distributed import launch
from dschat.distributed.deepspeed_config import DTYPES
from dschat.distributed.terminal import printable
from dschat.generation import ROLLOUT_ENGINES, EngineSettings, SamplingParams
from dschat.generation.vllm.requirements import vllm_problems
from dschat.models.causal_lm import TokenLogprobs, load_causal_lm, load_tokenizer
from dschat.models.lora import add_lora
from dschat.models.tokenizer import id_limit
from dschat.rlhf.rollouts.diagnosis import Gap, Report, diagnose
from dschat.runs.validation import model_problems

QUESTIONS = (
    "Hi.", "What is the capital of France?", "Add 17 and 25, and explain each step.", "Write a haiku about rain.",
    "List three prime numbers above 100.", "Translate 'good morning' into Spanish, German and Italian.",
    "Why is the sky blue? Answer in two sentences, then give an analogy that a child would understand.",
    "Summarise: the quick brown fox jumps over the lazy dog, which does not care, as it has seen many foxes before.",
)  # fmt: skip


def parse(arguments: list[str] | None) -> argparse.Namespace:
    lines = __doc__.splitlines()
    parser = argparse.ArgumentParser(description=lines[0], epilog=" ".join(lines[4:]))
    parser.add_argument("model", help="folder of a model, or a hub name")
    parser.add_argument("--rollout_engine", choices=ROLLOUT_ENGINES, default="hybrid")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--temperature", type=number_type(float, above=0), default=0.7)
    parser.add_argument("--top_p", type=number_type(float, above=0, at_most=1), default=1.0)
    parser.add_argument("--top_k", type=number_type(int, at_least=0), default=0)
    parser.add_argument("--max_new_tokens", type=number_type(int, at_least=4), default=64)
    parser.add_argument("--lora_dim", type=number_type(int, at_least=0), default=0,
                        help="also add random LoRA adapters of this rank, which the engine must apply")  # fmt: skip
    parser.add_argument("--seed", type=number_type(int, **SEEDS), default=0)
    parser.add_argument("--vllm_engine_args", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--trust_remote_code", action="store_true", help=TRUST_HELP)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Load the model, diagnose its engine, print the report; returns the exit status."""
    tokenizer = load_tokenizer(options.model, trust_remote_code=options.trust_remote_code)
    prompts = [encode_prompt(tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]
    tokens = max(map(len, prompts)) + options.max_new_tokens
    problems = model_problems(
        "model", options.model, tokens=tokens, causal=True, lengths=f"the longest prompt and {options.max_new_tokens}",
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    vllm = VLLMArguments(vllm_engine_args=options.vllm_engine_args)
    if options.rollout_engine == "vllm":
        problems += vllm.problems() + vllm_problems(
            vllm, None, max_tokens=tokens, dtype=DTYPES[options.dtype or "fp32"]
        )
    if problems:
        raise SettingsError("\n".join(problems))
    device = launch.join(seed=options.seed)
    default = "fp32" if get_accelerator().device_name() == "cpu" else "bf16"
    dtype = DTYPES[options.dtype or default]
    model = load_causal_lm(options.model, dtype=dtype, trust_remote_code=options.trust_remote_code).to(device)
    if options.lora_dim:
        add_random_adapters(model, dim=options.lora_dim)
    rollouts = RolloutArguments(max_prompt_seq_len=max(map(len, prompts)), max_answer_seq_len=options.max_new_tokens)
    engine = ROLLOUT_ENGINES[options.rollout_engine](
        TokenLogprobs(model), EngineSettings(rollouts=rollouts, vllm=vllm, seed=options.seed)
    )
    stops = stop_token_ids(tokenizer, model.generation_config.eos_token_id)
    report = diagnose(
        model, engine, prompts, sampling=SamplingParams(
            options.temperature, options.top_k, options.top_p, vocabulary_size=id_limit(tokenizer)
        ),
        max_new_tokens=options.max_new_tokens, eos_token_ids=stops, pad_token_id=tokenizer.pad_token_id,
        seed=options.seed,
    )  # fmt: skip
    print(text_of(report, tokenizer, stops=stops, folder=Path(options.model)))
    return int(bool(report.verdict))


def add_random_adapters(model: torch.nn.Module, *, dim: int) -> None:
    """LoRA adapters that change the model's outputs; new ones would not, as their B is 0."""
    add_lora(model, dim=dim, module_name="", only_optimize_lora=True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def text_of(report: Report, tokenizer: PreTrainedTokenizerBase, *, stops: list[int], folder: Path) -> str:
    """The report as the terminal shows it."""
    lines = [
        f"{'greedy tokens':28} {report.greedy_agreement:.1%} are the model's most likely ones; the largest margin of "
        f"the others is {report.greedy_margin:.3g} nats",
        line_of("sampled, first weights", report.before),
        line_of("sampled, after an update", report.after),
        f"{'stop tokens':28} {' '.join(map(repr, tokenizer.convert_ids_to_tokens(stops)))}",
        f"{'chat template':28} {template_of(tokenizer, folder)}",
    ]
    if report.verdict:
        lines.append("the largest differences:")
        rollout, ids = report.rollout, report.rollout.responses()
        for row, position in report.worst:
            before = tokenizer.decode(ids[row][max(0, position - 8) : position])
            token = tokenizer.decode(ids[row][position : position + 1])
            difference, logprob = float(report.rollout_gap[row, position]), float(rollout.logprobs[row, position])
            lines.append(
                f"  response {row}, token {position}: …{before!r} → {token!r}: engine {logprob:.3f}, model "
                f"{logprob + difference:.3f} nats"
            )
    verdict = report.verdict or "rounding only: the engine samples from the model that is trained"
    return printable("\n".join([*lines, f"verdict: {verdict}"]))


def line_of(name: str, gap: Gap) -> str:
    by_position = ", ".join(f"{mean:.1g}" for mean in gap.by_position)
    return (
        f"{name:28} |log-prob difference|: mean {gap.mean:.2g}, largest {gap.largest:.2g} nats; by quarter of the "
        f"response {by_position}; mean ratio {gap.ratio:.5f}"
    )


def template_of(tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    """Where the prompts' chat template comes from."""
    own = (folder / "chat_template.jinja").exists()
    if not own and (folder / "tokenizer_config.json").exists():
        own = "chat_template" in json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    return "the model's own" if own or not folder.is_dir() else "the suite's default: the model's folder has none"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    with exit_on_mistake("doctor"):
        return run(options)


if __name__ == "__main__":
    sys.exit(main())

"""Flags for sampling responses, in rollouts and in make_preferences.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dschat.arguments.flags import flag
from dschat.arguments.models import TRUST_HELP
from dschat.arguments.run import MAX_TIMEOUT


@dataclass
class SamplingArguments:
    """Sampling parameters, and a judge that scores responses."""

    _argument_group_name: ClassVar[str] = "sampling"
    max_prompt_seq_len: int = flag(256, "Maximum prompt length, in tokens.", at_least=1, on_resume="refuse")
    max_answer_seq_len: int = flag(
        256, "Maximum response length, in tokens, EOS included.", at_least=1, on_resume="refuse"
    )
    per_device_generation_batch_size: int = flag(
        16, "Prompts per rollout batch and device.", at_least=1, on_resume="apply"
    )
    temperature: float = flag(
        1.0,
        "Sampling temperature; log-probs are computed at the same temperature.",
        at_least=1e-30,  # generation.sampling.MIN_TEMPERATURE
        on_resume="apply",
    )
    top_k: int = flag(
        0,
        "Sample from the k most probable tokens only; 0: from all. Above 0, policy ratios are biased.",
        at_least=0,
        on_resume="apply",
    )
    top_p: float = flag(
        1.0,
        "Sample from the smallest set of tokens with this total probability. Below 1, policy ratios are biased.",
        above=0,
        at_most=1,
        on_resume="apply",
    )
    judge: str | None = flag(
        None,
        "FILE.py:FUNCTION(prompts, responses, rows) that returns a score for each response; step 3 logs "
        "them, and does not train on them. Default: none.",
        on_resume="apply",
    )
    judge_timeout: float = flag(
        300.0,
        "Timeout of the judge for one batch, in seconds; inf: no limit.",
        above=0,
        at_most=MAX_TIMEOUT,
        finite=False,
        needs=["judge"],
        on_resume="apply",
    )
    judge_retries: int = flag(
        2, "Further calls of a judge that has failed.", at_least=0, needs=["judge"], on_resume="apply"
    )

    def problems(self) -> list[str]:
        if self.judge and not Path(self.judge.partition(":")[0]).is_file():
            return [f"--judge {self.judge}: there is no file {self.judge.partition(':')[0]}; write FILE.py:FUNCTION"]
        return []


@dataclass
class PairArguments(SamplingArguments):
    """Preference pairs: responses sampled from a model and labelled by a judge or by rewards."""

    model_name_or_path: str = flag(
        "", "Causal language model that generates the responses: a folder or hub name.", on_resume="refuse"
    )
    num_samples_per_prompt: int = flag(
        4, "Responses sampled for each prompt.", at_least=2, at_most=65536, on_resume="refuse"
    )
    pairs_per_prompt: int = flag(
        1, "Maximum number of pairs from the responses to a prompt.", at_least=1, on_resume="apply"
    )
    trust_remote_code: bool = flag(False, TRUST_HELP, on_resume="apply")

    def problems(self) -> list[str]:
        needed = [] if self.model_name_or_path else ["--model_name_or_path: is required"]
        return needed + super().problems()


@dataclass
class RolloutArguments(SamplingArguments):
    """Rollouts of step 3."""

    _argument_group_name: ClassVar[str] = "rollouts"
    generation_batches: int = flag(1, "Rollout batches per iteration.", at_least=1, on_resume="refuse")
    enable_hybrid_engine: bool = flag(
        True,
        "Generate with the suite's own decoder (dschat.generation); False: with transformers' generate.",
        on_resume="apply",
    )
    rollout_engine: str | None = flag(
        None,
        "Rollout engine by name: hybrid, transformers or vllm. Default: as --enable_hybrid_engine selects.",
        on_resume="apply",
    )
    generation_slots: int = flag(
        0,
        "Maximum number of rows decoded at once per device; 0: as many as memory allows.",
        at_least=0,
        on_resume="apply",
    )
    generation_memory_fraction: float = flag(
        0.8,
        "Fraction of the device's free memory that the KV cache of a rollout may use.",
        above=0,
        at_most=1,
        on_resume="apply",
    )
    pin_generation_buffers: bool = flag(
        False,
        "Keep KV cache, copied weights and captured graphs between rollouts: faster, but uses memory in training.",
        on_resume="apply",
    )
    offload_states_during_rollout: bool = flag(
        False,
        "Move optimizer states, and the models that a rollout does not need, to host memory while it runs.",
        on_resume="apply",
    )
    check_rollouts_every: int = flag(
        50,
        "Compare the log-probs of the rollout engine with the policy's (and the weights of vLLM) in the first "
        "iteration and every N-th; a difference beyond rounding ends the run. 0: in the first only.",
        at_least=0,
        on_resume="apply",
    )
    print_answers: bool = flag(False, "Print sampled responses to the console.", on_resume="apply")
    print_answers_interval: int = flag(
        1, "Print sampled responses every N iterations.", at_least=1, needs=["print_answers"], on_resume="apply"
    )

    @property
    def engine(self) -> str:
        """Name of the rollout engine in dschat.generation.ROLLOUT_ENGINES."""
        return self.rollout_engine or ("hybrid" if self.enable_hybrid_engine else "transformers")

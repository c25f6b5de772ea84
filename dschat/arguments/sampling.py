"""Flags for sampling responses, in rollouts and in make_preferences.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dschat.arguments.command_line import flag
from dschat.arguments.models import TRUST_HELP
from dschat.arguments.run import LONGEST_WAIT


@dataclass
class SamplingArguments:
    """Sampling parameters, and a judge that scores responses."""

    _argument_group_name: ClassVar[str] = "sampling"
    max_prompt_seq_len: int = flag(256, "longest prompt", at_least=1, on_resume="refuse")
    max_answer_seq_len: int = flag(256, "longest response, its EOS included", at_least=1, on_resume="refuse")
    per_device_generation_batch_size: int = flag(16, "prompts per rollout batch and device", at_least=1)
    temperature: float = flag(
        1.0, "softens the distribution that is sampled; log-probs are taken under it too",
        at_least=1e-30,  # generation.sampling.LOWEST_TEMPERATURE
    )  # fmt: skip
    top_k: int = flag(0, "sample among this many tokens; 0: all. Otherwise the policy ratio is biased", at_least=0)
    top_p: float = flag(
        1.0, "sample within this probability mass. Below 1 the policy ratio is biased", above=0, at_most=1
    )
    judge: str | None = flag(
        None, "FILE.py:FUNCTION(prompts, responses, rows) -> scores; step 3 watches, never trains on it"
    )
    judge_timeout: float = flag(
        300.0, "seconds that the judge may take for a batch; inf: no limit",
        above=0, at_most=LONGEST_WAIT, finite=False, needs=["judge"],
    )
    judge_retries: int = flag(2, "how often it is asked again where it fails", at_least=0, needs=["judge"])

    def problems(self) -> list[str]:
        if self.judge and not Path(self.judge.partition(":")[0]).is_file():
            return [f"--judge {self.judge}: there is no file {self.judge.partition(':')[0]}; write FILE.py:FUNCTION"]
        return []


@dataclass
class PairArguments(SamplingArguments):
    """Preference pairs: responses sampled from a model and labelled by a judge or by rewards."""

    model_name_or_path: str = flag("", "the causal language model that answers", on_resume="refuse")
    num_samples_per_prompt: int = flag(4, "answers sampled for each prompt", at_least=2, at_most=65536,
                                      on_resume="refuse")  # fmt: skip
    pairs_per_prompt: int = flag(1, "at most so many pairs of each prompt's answers", at_least=1)
    trust_remote_code: bool = flag(False, TRUST_HELP)

    def problems(self) -> list[str]:
        needed = [] if self.model_name_or_path else ["--model_name_or_path: is needed"]
        return needed + super().problems()


@dataclass
class RolloutArguments(SamplingArguments):
    """Rollouts of step 3."""

    _argument_group_name: ClassVar[str] = "rollouts"
    generation_batches: int = flag(1, "rollout batches per iteration", at_least=1, on_resume="refuse")
    enable_hybrid_engine: bool = flag(True, "decode with dschat.generation; else with transformers' generate")
    rollout_engine: str | None = flag(
        None, "hybrid or transformers, the same choice by name; default: hybrid, unless --enable_hybrid_engine False"
    )
    generation_slots: int = flag(0, "rows decoded at once per device; 0: as many as memory allows", at_least=0)
    generation_memory_fraction: float = flag(
        0.8, "share of the device's free memory that keys and values of a rollout may take", above=0, at_most=1
    )
    pin_generation_buffers: bool = flag(False, "keep keys, values, copied weights and captured steps between rollouts")
    print_answers: bool = flag(False, "print sampled answers to the console")
    print_answers_interval: int = flag(1, "print them every so many iterations", at_least=1, needs=["print_answers"])

    @property
    def uses_hybrid_engine(self) -> bool:
        return self.engine == "hybrid"

    @property
    def engine(self) -> str:
        """Name of the rollout engine in dschat.generation.ROLLOUT_ENGINES."""
        return self.rollout_engine or ("hybrid" if self.enable_hybrid_engine else "transformers")

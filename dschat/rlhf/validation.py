"""Validation of step 3's settings: problems that stop the run, and warnings."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from datasets import Dataset
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig

from dschat.arguments import (
    OptimizerArguments,
    PPOArguments,
    RewardArguments,
    RLHFModelArguments,
    RLHFSettings,
    RolloutArguments,
    VLLMArguments,
)
from dschat.data.datasets import data_problems
from dschat.distributed.deepspeed_config import DTYPES
from dschat.generation import ROLLOUT_ENGINES
from dschat.generation.vllm.adapters import RANKS, engine_rank
from dschat.generation.vllm.requirements import vllm_problems
from dschat.models.causal_lm import load_tokenizer
from dschat.rewards.functions import judge_problems
from dschat.rewards.reward_model import required_positions
from dschat.rewards.specification import column_problems, model_paths, reward_problems
from dschat.runs.output_conflicts import overwritten_models
from dschat.runs.set_up import data_options
from dschat.runs.validation import contradictions, model_problems


def reward_entries(models: RLHFModelArguments, rewards: RewardArguments) -> list[str]:
    """The reward sources: the reward model and --reward; without either, the critic's initial model."""
    reward_model = [models.reward_model_name_or_path] if models.reward_model_name_or_path else []
    fallback = [models.critic_model_name_or_path] if models.critic_model_name_or_path else []
    return [*reward_model, *rewards.reward] or fallback


def rlhf_problems(settings: RLHFSettings) -> list[str]:
    """Problems with step 3's settings: models, lengths, output folder, data, and the split into minibatches."""
    models, rollouts, ppo, rewards = settings.models, settings.rollouts, settings.ppo, settings.rewards
    problems = rlhf_model_problems(settings)
    dims, stages = {"actor_lora_dim": models.actor_lora_dim}, {"actor_zero_stage": models.actor_zero_stage}
    if ppo.trains_critic:
        dims["critic_lora_dim"], stages["critic_zero_stage"] = models.critic_lora_dim, models.critic_zero_stage
    problems += contradictions(settings.lora, settings.devices, dims=dims, stages=stages)
    model_paths_by_flag = [
        ("--actor_model_name_or_path", models.actor_model_name_or_path),
        ("--critic_model_name_or_path", models.critic_model_name_or_path),
        ("--reward_model_name_or_path", models.reward_model_name_or_path),
        *(("--reward", path) for path in ([] if problems else model_paths(rewards.reward))),
    ]
    problems += overwritten_models(settings.run.output_dir, model_paths_by_flag)
    problems += judge_problems(rollouts.judge)
    options = data_options(settings.data, settings.run, max_tokens=rollouts.max_prompt_seq_len)
    problems += data_problems("prompt", options)
    if ppo.unsupervised_dataset_name:
        texts = replace(
            options, data_path=[ppo.unsupervised_dataset_name], data_split=None, eval_data_path=(), columns={}
        )
        problems += data_problems("sft", texts)
    if rollouts.engine not in ROLLOUT_ENGINES:
        problems.append(f"--rollout_engine {rollouts.engine}: choose one of {', '.join(ROLLOUT_ENGINES)}")
    if rollouts.rollout_engine == "hybrid" and not rollouts.enable_hybrid_engine:
        problems.append("--rollout_engine hybrid, but --enable_hybrid_engine False: drop one of them")
    if rollouts.engine == "vllm":
        problems += vllm_engine_problems(settings)
    if ppo.overlong_buffer > rollouts.max_answer_seq_len:
        problems.append(
            f"--overlong_buffer {ppo.overlong_buffer} is more than --max_answer_seq_len {rollouts.max_answer_seq_len}: "
            "the buffer is the last part of a response"
        )
    return problems + minibatch_problems(rollouts, ppo, settings.optimizer)


def check_reward_columns(settings: RLHFSettings, prompts: Dataset) -> None:
    """Raise a ValueError if a reward function takes a column that no row of the prompts has."""
    entries = reward_entries(settings.models, settings.rewards)
    rows = LazyRows(prompts)
    if len(rows) and (problems := column_problems(entries, rows)):
        raise ValueError("\n".join(problems))


class LazyRows(Sequence[dict]):
    """The other columns of rows of kind "prompt", parsed when they are read."""

    def __init__(self, prompts: Dataset) -> None:
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        return json.loads(self.prompts[index]["row"])


def vllm_engine_problems(settings: RLHFSettings) -> list[str]:
    """Problems with --rollout_engine vllm: flags of other engines, the installation, the model."""
    rollouts, models = settings.rollouts, settings.models
    hybrid = ("generation_slots", "generation_memory_fraction", "pin_generation_buffers")
    problems = [
        f"--{name}: is a flag of the hybrid engine, not of --rollout_engine vllm"
        for name in changed_flags(rollouts, RolloutArguments())
        if name in hybrid
    ]
    if settings.vllm.vllm_quantization and settings.ppo.rollout_correction == "none":
        problems.append(
            f"--vllm_quantization {settings.vllm.vllm_quantization}: rollouts come from other weights than those of "
            "the policy, which --rollout_correction must correct: choose tis"
        )
    try:
        config = AutoConfig.from_pretrained(
            models.actor_model_name_or_path, trust_remote_code=models.trust_remote_code
        )
    except (OSError, ValueError):
        config = None  # rlhf_model_problems says why
    max_tokens = rollouts.max_prompt_seq_len + rollouts.max_answer_seq_len
    problems += adapter_problems(settings)
    return problems + vllm_problems(settings.vllm, config, max_tokens=max_tokens, dtype=DTYPES[settings.devices.dtype])


def adapter_problems(settings: RLHFSettings) -> list[str]:
    """--vllm_lora with weights other than adapters in training, or with adapters that vLLM does not hold."""
    dim = settings.models.actor_lora_dim
    if not settings.vllm.vllm_lora:
        return []
    if not dim or not settings.lora.only_optimize_lora:
        return ["--vllm_lora: loads adapters alone, so train adapters alone: --actor_lora_dim 16 --only_optimize_lora"]
    return [] if engine_rank(dim) else [f"--vllm_lora: vLLM holds adapters of rank {RANKS[-1]} or less, not {dim}"]


def changed_flags(group: Any, defaults: Any) -> list[str]:
    """Names of the group's flags that are not at their defaults."""
    return [name for name, value in vars(group).items() if value != getattr(defaults, name)]


def rlhf_model_problems(settings: RLHFSettings) -> list[str]:
    """Problems with actor, critic and reward sources."""
    models, rollouts, ppo, rewards = settings.models, settings.rollouts, settings.ppo, settings.rewards
    add_eot_token = settings.data.add_eot_token
    tokens = rollouts.max_prompt_seq_len + rollouts.max_answer_seq_len
    lengths = f"--max_prompt_seq_len {rollouts.max_prompt_seq_len} + --max_answer_seq_len {rollouts.max_answer_seq_len}"
    trusted = models.trust_remote_code
    problems_of = partial(model_problems, lengths=lengths, add_eot_token=add_eot_token, trust_remote_code=trusted)
    problems = problems_of("--actor_model_name_or_path", models.actor_model_name_or_path, tokens=tokens, causal=True)
    entries = reward_entries(models, rewards)
    if not entries:
        problems.append(
            "--reward: name a reward model's folder (step 2's output), FILE.py:FUNCTION, the address of a service, "
            "or a rule such as last_number"
        )
    problems += reward_problems(entries, max_tokens=rollouts.max_answer_seq_len)
    for path in [] if problems or not models.actor_model_name_or_path else model_paths(entries):
        path_problems = model_problems("--reward", path, tokens=2, lengths=lengths, trust_remote_code=trusted)
        if not path_problems and not (ppo.trains_critic and path == models.critic_path):  # a critic is checked below
            length = required_positions(
                path, models.actor_model_name_or_path, tokens=tokens, add_eot_token=add_eot_token,
                trust_remote_code=trusted,
            )  # fmt: skip
            path_problems = model_problems("--reward", path, tokens=length, lengths=lengths, trust_remote_code=trusted)
        problems += path_problems
    if ppo.trains_critic and models.critic_path != models.actor_model_name_or_path:
        flag = "--critic_model_name_or_path" if models.critic_model_name_or_path else "--reward_model_name_or_path"
        problems += problems_of(flag, models.critic_path, tokens=tokens)
    if not problems and ppo.trains_critic and models.actor_model_name_or_path:
        load = partial(load_tokenizer, add_eot_token=add_eot_token, trust_remote_code=trusted)
        if load(models.critic_path).get_vocab() != load(models.actor_model_name_or_path).get_vocab():
            problems.append(
                f"--critic_model_name_or_path {models.critic_path}: reads the actor's token ids, but has another "
                "vocabulary: name a critic with the actor's tokenizer (the actor's own folder will do: it gets a new "
                "head)"
            )
    return problems


def minibatch_problems(rollouts: RolloutArguments, ppo: PPOArguments, optimizer: OptimizerArguments) -> list[str]:
    """Problems with splitting a rollout into minibatches of whole groups."""
    samples = ppo.num_samples_per_prompt
    rows = rollouts.per_device_generation_batch_size * rollouts.generation_batches * samples
    minibatch = ppo.per_device_training_batch_size * optimizer.gradient_accumulation_steps
    minibatch_flags = (
        f"--per_device_training_batch_size {ppo.per_device_training_batch_size} x --gradient_accumulation_steps "
        f"{optimizer.gradient_accumulation_steps} = {minibatch}"
    )
    problems = []
    if rows % minibatch:
        problems.append(
            f"--per_device_generation_batch_size {rollouts.per_device_generation_batch_size} x --generation_batches "
            f"{rollouts.generation_batches} x --num_samples_per_prompt {samples} = {rows} sequences do not divide into "
            f"minibatches of {minibatch_flags}: make the first a multiple of the second"
        )
    if minibatch % samples:
        problems.append(
            f"minibatches of {minibatch_flags} do not hold whole groups of --num_samples_per_prompt {samples}: make "
            "the first a multiple of the second"
        )
    return problems


def rlhf_warnings(settings: RLHFSettings) -> list[str]:
    """Settings of step 3 that are valid but probably not intended."""
    models, rollouts, ppo, rewards = settings.models, settings.rollouts, settings.ppo, settings.rewards
    warnings = []
    if ppo.kl_in == "loss" and ppo.kl_coef and ppo.kl_estimator == "k1":
        warnings.append(
            "--kl_in loss with --kl_estimator k1 does not limit KL: the gradient of k1 is 0 on average; choose k2 or "
            "k3+"
        )
    if (
        models.critic_model_name_or_path
        and not ppo.trains_critic
        and reward_entries(models, rewards) != [models.critic_model_name_or_path]
    ):
        warnings.append(f"--critic_model_name_or_path has no effect: --algorithm {ppo.algorithm} trains no critic")
    unused = [] if rollouts.engine == "vllm" else changed_flags(settings.vllm, VLLMArguments())
    warnings += [f"--{name} has no effect: --rollout_engine is {rollouts.engine}" for name in unused]
    if rollouts.offload_states_during_rollout and get_accelerator().device_name() == "cpu":
        warnings.append("--offload_states_during_rollout only costs time on a CPU, whose memory is the host's")
    tokens = rollouts.max_prompt_seq_len + rollouts.max_answer_seq_len
    if 0 < settings.devices.max_tokens_per_micro_batch < tokens:
        warnings.append(
            f"--max_tokens_per_micro_batch {settings.devices.max_tokens_per_micro_batch}: --max_prompt_seq_len + "
            f"--max_answer_seq_len is {tokens} tokens, and a longer sequence is a micro-batch of its own: {tokens} or "
            "more is a limit that always holds"
        )
    truncation = [f"--top_p {rollouts.top_p}"] if rollouts.top_p < 1 else []
    truncation += [f"--top_k {rollouts.top_k}"] if rollouts.top_k else []
    if ppo.old_logprobs != "rollout" or not truncation:
        return warnings
    return [
        *warnings,
        f"{' '.join(truncation)} with --old_logprobs rollout: the decoder's log-probs are those of the truncated, "
        "renormalised distribution, the actor's those of the whole one. So the ratio starts at the probability mass "
        "that was kept, below 1, and clipping cuts tokens before the policy has moved (those of negative advantage "
        f"whose mass is below 1 - {ppo.clip_range_low}): choose --top_p 1 --top_k 0, or --old_logprobs recompute, with "
        "which --rollout_correction tis weights each token by that mass",
    ]

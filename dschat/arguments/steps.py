"""Settings of each program: its argument groups by name, as `parse` returns them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dschat.arguments.data import DataArguments
from dschat.arguments.evaluation import EvaluationArguments
from dschat.arguments.models import ModelArguments, RewardModelArguments, RLHFModelArguments, SupervisedArguments
from dschat.arguments.optimizer import LoraArguments, OptimizerArguments
from dschat.arguments.pairs import PairDeviceArguments, PairRunArguments, PromptDataArguments
from dschat.arguments.ppo import PPOArguments
from dschat.arguments.preference import PolicyArguments, PreferenceArguments
from dschat.arguments.rewards import RewardArguments
from dschat.arguments.run import DeviceArguments, RunArguments
from dschat.arguments.sampling import PairArguments, RolloutArguments
from dschat.arguments.vllm import VLLMArguments


@dataclass(frozen=True, kw_only=True)
class OneModelSettings:
    """Argument groups of the steps that train one model (1 and 2)."""

    model: ModelArguments = field(default_factory=ModelArguments)
    data: DataArguments = field(default_factory=DataArguments)
    optimizer: OptimizerArguments = field(default_factory=OptimizerArguments)
    lora: LoraArguments = field(default_factory=LoraArguments)
    devices: DeviceArguments = field(default_factory=DeviceArguments)
    run: RunArguments = field(default_factory=RunArguments)


@dataclass(frozen=True, kw_only=True)
class SFTSettings(OneModelSettings):
    """step1_supervised_finetuning."""

    supervised: SupervisedArguments = field(default_factory=SupervisedArguments)


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings(OneModelSettings):
    """step2_reward_model_finetuning."""

    reward_model: RewardModelArguments = field(default_factory=RewardModelArguments)


@dataclass(frozen=True, kw_only=True)
class PreferenceSettings(OneModelSettings):
    """step2_dpo_finetuning."""

    model: PolicyArguments = field(default_factory=PolicyArguments)
    preference: PreferenceArguments = field(default_factory=PreferenceArguments)


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """make_preferences.py."""

    sampling: PairArguments = field(default_factory=PairArguments)
    rewards: RewardArguments = field(default_factory=RewardArguments)
    data: PromptDataArguments = field(default_factory=PromptDataArguments)
    devices: PairDeviceArguments = field(default_factory=PairDeviceArguments)
    run: PairRunArguments = field(default_factory=PairRunArguments)


@dataclass(frozen=True, kw_only=True)
class RLHFSettings:
    """step3_rlhf_finetuning."""

    models: RLHFModelArguments = field(default_factory=RLHFModelArguments)
    rollouts: RolloutArguments = field(default_factory=RolloutArguments)
    vllm: VLLMArguments = field(default_factory=VLLMArguments)
    ppo: PPOArguments = field(default_factory=PPOArguments)
    rewards: RewardArguments = field(default_factory=RewardArguments)
    evaluation: EvaluationArguments = field(default_factory=EvaluationArguments)
    data: DataArguments = field(default_factory=DataArguments)
    optimizer: OptimizerArguments = field(default_factory=OptimizerArguments)
    lora: LoraArguments = field(default_factory=LoraArguments)
    devices: DeviceArguments = field(default_factory=DeviceArguments)
    run: RunArguments = field(default_factory=RunArguments)


# Program, by the name of its folder (as in run.json) or its own: its settings.
PROGRAM_SETTINGS: dict[str, type] = {
    "step1_supervised_finetuning": SFTSettings,
    "step2_reward_model_finetuning": RewardModelSettings,
    "make_preferences": PairSettings,
    "step2_dpo_finetuning": PreferenceSettings,
    "step3_rlhf_finetuning": RLHFSettings,
}


def flag_values(settings: Any) -> dict[str, Any]:
    """Flag → value, over all groups of a program's settings."""
    return {name: value for group in asdict(settings).values() for name, value in group.items()}

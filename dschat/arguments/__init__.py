"""All command-line flags, each declared once: argument groups, composed by each step's main.py.

Lengths are in tokens, batch sizes in sequences, intervals in optimizer steps (in iterations for step 3).
"""

from dschat.arguments.data import DataArguments
from dschat.arguments.evaluation import EvaluationArguments
from dschat.arguments.models import ModelArguments, RewardModelArguments, RLHFModelArguments, SupervisedArguments
from dschat.arguments.optimizer import LoraArguments, OptimizerArguments
from dschat.arguments.pairs import PairDeviceArguments, PairRunArguments, PromptDataArguments
from dschat.arguments.ppo import PPOArguments
from dschat.arguments.preference import PolicyArguments, PreferenceArguments
from dschat.arguments.rewards import RewardArguments
from dschat.arguments.run import DeviceArguments, RunArguments
from dschat.arguments.sampling import PairArguments, RolloutArguments, SamplingArguments
from dschat.arguments.steps import (
    PROGRAM_SETTINGS,
    OneModelSettings,
    PairSettings,
    PreferenceSettings,
    RewardModelSettings,
    RLHFSettings,
    SFTSettings,
    flag_values,
)
from dschat.arguments.vllm import VLLMArguments

__all__ = [
    "PROGRAM_SETTINGS",
    "DataArguments",
    "DeviceArguments",
    "EvaluationArguments",
    "LoraArguments",
    "ModelArguments",
    "OneModelSettings",
    "OptimizerArguments",
    "PPOArguments",
    "PairArguments",
    "PairDeviceArguments",
    "PairRunArguments",
    "PairSettings",
    "PolicyArguments",
    "PreferenceArguments",
    "PreferenceSettings",
    "PromptDataArguments",
    "RLHFModelArguments",
    "RLHFSettings",
    "RewardArguments",
    "RewardModelArguments",
    "RewardModelSettings",
    "RolloutArguments",
    "RunArguments",
    "SFTSettings",
    "SamplingArguments",
    "SupervisedArguments",
    "VLLMArguments",
    "flag_values",
]

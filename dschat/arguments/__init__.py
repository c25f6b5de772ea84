"""Every flag of the suite, declared once: a group per concern, composed by each step's main.py.

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

__all__ = [
    "DataArguments",
    "DeviceArguments",
    "EvaluationArguments",
    "IDENTITY",
    "LoraArguments",
    "ModelArguments",
    "OptimizerArguments",
    "PPOArguments",
    "PairArguments",
    "PairDeviceArguments",
    "PairRunArguments",
    "PolicyArguments",
    "PreferenceArguments",
    "PromptDataArguments",
    "RLHFModelArguments",
    "RewardArguments",
    "RewardModelArguments",
    "RolloutArguments",
    "RunArguments",
    "SILENT",
    "SamplingArguments",
    "SupervisedArguments",
]

# Flags that make another run of a checkpoint: its models, its data, its random numbers, its shapes.
IDENTITY = frozenset(
    [
        "seed",
        "data_path",
        "data_split",
        "eval_data_path",
        "eval_fraction",
        "overlong",
        "drop_duplicates",
        "prompt_column",
        "response_column",
        "messages_column",
        "chosen_column",
        "rejected_column",
        "margin_column",
        "text_column",
        "system_column",
        "tools_column",
        "add_eot_token",
        "parse_special_tokens",
        "dtype",
        "model_name_or_path",
        "lora_dim",
        "actor_model_name_or_path",
        "critic_model_name_or_path",
        "reward_model_name_or_path",
        "reward",
        "normalize_rewards",
        "ref_model_name_or_path",
        "actor_lora_dim",
        "critic_lora_dim",
        "only_optimize_lora",
        "lora_module_name",
        "max_seq_len",
        "max_prompt_seq_len",
        "max_answer_seq_len",
        "train_on_prompt",
        "packing",
        "preference_loss",
        "length_normalized",
        "unsupervised_dataset_name",
        "lr_scheduler_type",
        "num_warmup_steps",
        "ppo_epochs",
        "algorithm",
        "num_samples_per_prompt",
        "dynamic_sampling",
        "generation_batches",
    ]
)
# Flags that may always change: nobody has to hear of it.
SILENT = frozenset(["resume", "resume_anyway", "local_rank"])

"""Every spelling of a flag, choice or reward rule that was ever released is accepted.

No flag has been renamed so far. One that is renamed stays in these lists, accepted as an alias with a warning.
"""

import inspect

import pytest

from dschat import arguments
from dschat.arguments.command_line import SuiteParser, group_types
from dschat.generation import ROLLOUT_ENGINES
from dschat.rewards.rules import RULES

ONE_MODEL = """
    model_name_or_path max_seq_len per_device_train_batch_size per_device_eval_batch_size learning_rate weight_decay
    dropout zero_stage lora_dim trust_remote_code data_path data_split data_output_path eval_data_path eval_fraction
    max_bad_rows overlong drop_duplicates prompt_column response_column messages_column chosen_column
    rejected_column margin_column text_column system_column tools_column parse_special_tokens add_eot_token
    lr_scheduler_type num_warmup_steps max_grad_norm adam_beta1 adam_beta2 gradient_accumulation_steps
    lora_module_name lora_learning_rate only_optimize_lora dtype offload gradient_checkpointing deterministic
    deepspeed_config output_dir seed num_train_epochs max_steps eval_interval eval_iters best_metric best_mode
    save_interval save_minutes keep_checkpoints resume max_bad_steps warn_sigma collective_timeout
    rendezvous_timeout resume_anyway enable_tensorboard tensorboard_path local_rank
"""
SFT = """
    train_on_prompt packing
"""
REWARD_MODEL = """
    centering_coef
"""
PREFERENCE = """
    preference_loss beta label_smoothing simpo_gamma desirable_weight undesirable_weight length_normalized sft_coef
    reference ref_model_name_or_path
"""
PAIRS = """
    max_prompt_seq_len max_answer_seq_len per_device_generation_batch_size temperature top_k top_p judge
    judge_timeout judge_retries model_name_or_path num_samples_per_prompt pairs_per_prompt trust_remote_code reward
    reward_timeout reward_retries normalize_rewards data_path data_split data_output_path eval_data_path
    eval_fraction max_bad_rows overlong drop_duplicates prompt_column messages_column chosen_column rejected_column
    system_column tools_column parse_special_tokens dtype deterministic output_dir seed resume collective_timeout
    local_rank overwrite
"""
RLHF = """
    actor_model_name_or_path reward_model_name_or_path critic_model_name_or_path actor_learning_rate
    critic_learning_rate actor_weight_decay critic_weight_decay actor_zero_stage critic_zero_stage actor_lora_dim
    critic_lora_dim actor_dropout critic_dropout offload_reference_model offload_reward_model enable_ema ema_decay
    trust_remote_code max_prompt_seq_len max_answer_seq_len per_device_generation_batch_size temperature top_k top_p
    judge judge_timeout judge_retries generation_batches enable_hybrid_engine no_enable_hybrid_engine rollout_engine
    generation_slots generation_memory_fraction pin_generation_buffers print_answers print_answers_interval
    algorithm num_samples_per_prompt per_device_training_batch_size ppo_epochs policy_loss loss_aggregation
    clip_range clip_range_low clip_range_high dual_clip sapo_positive_temperature sapo_negative_temperature
    entropy_coef kl_coef kl_in kl_estimator kl_clip kl_target kl_horizon ref_refresh_interval value_clip_range
    actor_freeze_steps gamma gae_lambda whiten_advantages reward_clip missing_eos_penalty overlong_buffer
    overlong_factor mask_truncated dynamic_sampling old_logprobs rollout_correction rollout_correction_cap
    rollout_correction_floor stop_at_kl dump_step unsupervised_dataset_name unsup_coef reward reward_timeout
    reward_retries normalize_rewards eval_num_samples eval_success_score eval_answer data_path data_split
    data_output_path eval_data_path eval_fraction max_bad_rows overlong drop_duplicates prompt_column
    response_column messages_column chosen_column rejected_column margin_column text_column system_column
    tools_column parse_special_tokens add_eot_token lr_scheduler_type num_warmup_steps max_grad_norm adam_beta1
    adam_beta2 gradient_accumulation_steps lora_module_name lora_learning_rate only_optimize_lora dtype offload
    gradient_checkpointing deterministic deepspeed_config output_dir seed num_train_epochs max_steps eval_interval
    eval_iters best_metric best_mode save_interval save_minutes keep_checkpoints resume max_bad_steps warn_sigma
    collective_timeout rendezvous_timeout resume_anyway enable_tensorboard tensorboard_path local_rank
"""
CHOICES = {
    "zero_stage": "0 1 2 3",
    "overlong": "truncate drop",
    "lr_scheduler_type": "linear cosine constant constant_with_warmup polynomial",
    "dtype": "bf16 fp16 fp32",
    "best_mode": "max min",
    "preference_loss": "dpo ipo hinge robust simpo orpo kto",
    "reference": "precompute adapters_off",
    "resume": "auto never",
    "actor_zero_stage": "0 1 2 3",
    "critic_zero_stage": "0 1 2 3",
    "algorithm": "ppo grpo dr_grpo rloo reinforce++ reinforce++_baseline remax opo",
    "policy_loss": "ppo_clip gspo cispo sapo",
    "loss_aggregation": "token_mean seq_mean_token_mean seq_mean_token_sum_norm",
    "kl_in": "reward loss",
    "kl_estimator": "k1 k2 k3 k3+",
    "old_logprobs": "recompute rollout",
    "rollout_correction": "none tis mis seq_tis seq_mis",
    "eval_answer": "last_number boxed tag text",
}
RULE_OPTIONS = {
    "exact": "column case",
    "last_number": "column tolerance",
    "boxed": "column",
    "format": "tags",
    "length": "target max",
    "repetition": "ngram",
    "overlong": "buffer factor",
    "reasoning_gym": "",
}
PROGRAMS = {
    arguments.SFTSettings: ONE_MODEL + SFT,
    arguments.RewardModelSettings: ONE_MODEL + REWARD_MODEL,
    arguments.PreferenceSettings: ONE_MODEL + PREFERENCE,
    arguments.PairSettings: PAIRS,
    arguments.RLHFSettings: RLHF,
}


@pytest.mark.parametrize(("settings", "released"), PROGRAMS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_released_flags_and_yaml_keys_are_accepted(settings, released):
    flags = SuiteParser(tuple(group_types(settings).values())).flags()  # YAML keys are looked up here too
    assert set(released.split()) - flags.keys() == set()
    for name, choices in CHOICES.items():
        if name in flags and flags[name].choices:
            assert set(choices.split()) - set(map(str, flags[name].choices)) == set(), name


def test_released_rules_with_their_options_and_rollout_engines_are_accepted():
    for rule, options in RULE_OPTIONS.items():
        assert set(options.split()) <= inspect.signature(RULES[rule]).parameters.keys(), rule
    assert {"hybrid", "transformers"} <= ROLLOUT_ENGINES.keys()

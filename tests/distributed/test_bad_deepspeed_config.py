"""A --deepspeed_config that contradicts the flags or that DeepSpeed would refuse is reported in one line."""

from __future__ import annotations

import pytest
from bad_input import mistakes

DEEPSPEED = {  # content → key in the message; flag that owns it, or reason
    '{"train_batch_size": 4}': ("train_batch_size", "--per_device_train_batch_size"),
    '{"train_micro_batch_size_per_gpu": 4}': ("train_micro_batch_size_per_gpu", "--per_device_train_batch_size"),
    '{"gradient_accumulation_steps": 2}': ("gradient_accumulation_steps", "--gradient_accumulation_steps"),
    '{"gradient_clipping": 1.0}': ("gradient_clipping", "--max_grad_norm"),
    '{"gradient_clipping": "x"}': ("gradient_clipping", "--max_grad_norm"),
    '{"optimizer": {"type": "Adam"}}': ("optimizer", "--learning_rate"),
    '{"optimizer": null}': ("optimizer", "--learning_rate"),
    '{"scheduler": {"type": "WarmupLR"}}': ("scheduler", "--lr_scheduler_type"),
    '{"bf16": {"enabled": false}}': ("bf16.enabled", "--dtype"),
    '{"bf16": {"enabled": "yes"}}': ("bf16.enabled", "--dtype"),
    '{"bf16": {"enabled": 1}}': ("bf16.enabled", "--dtype"),
    '{"fp16": {"enabled": true}}': ("fp16.enabled", "--dtype"),
    '{"bfloat16": {"enabled": true}}': ("bfloat16", "--dtype"),
    '{"amp": {"enabled": true}}': ("amp", "--dtype"),
    '{"torch_autocast": {"enabled": true}}': ("torch_autocast", "--dtype"),
    '{"data_types": {"grad_accum_dtype": "fp16"}}': ("data_types.grad_accum_dtype", "--dtype"),
    '{"zero_optimization": {"stage": 3}}': ("zero_optimization.stage", "--zero_stage"),
    '{"zero_optimization": {"stage": 7}}': ("zero_optimization.stage", "--zero_stage"),
    '{"zero_optimization": {"cpu_offload": true}}': ("zero_optimization.cpu_offload", "--offload"),
    '{"elasticity": {"enabled": true}}': ("elasticity", "the launcher"),
    '{"autotuning": {"enabled": true}}': ("autotuning", "--zero_stage"),
    '{"zero_optimization": true}': ("zero_optimization", "must be an object, not true or false"),
    '{"zero_optimization": [2]}': ("zero_optimization", "must be an object, not a list"),
    '{"bf16": null}': ("bf16", "must be an object, not null"),
    '{"bf16": true}': ("bf16", "must be an object, not true or false"),
    '{"fp16": "auto"}': ("fp16", "must be an object, not a string"),
    '{"data_types": []}': ("data_types", "must be an object, not a list"),
    '{"aio": 1}': ("aio", "must be an object, not a number"),
    '{"activation_checkpointing": "yes"}': ("activation_checkpointing", "must be an object"),
    '{"flops_profiler": 3}': ("flops_profiler", "must be an object"),
    '{"compile": true}': ("compile", "must be an object"),
    '{"wall_clock_breakdown": "yes"}': ("wall_clock_breakdown", "must be true or false, not a string"),
    '{"prescale_gradients": 1}': ("prescale_gradients", "must be true or false, not a number"),
    '{"steps_per_print": "often"}': ("steps_per_print", "must be a number, not a string"),
    '{"gradient_predivide_factor": true}': ("gradient_predivide_factor", "must be a number"),
    '{"zero_optimization": {"overlap_com": true}}': ("overlap_com", "Extra inputs"),
    '{"zero_optimization": {"reduce_bucket_size": "big"}}': ("reduce_bucket_size", "valid integer"),
    '{"zero_optimization": {"reduce_bucket_size": -1}}': ("reduce_bucket_size", "a whole number from 1"),
    '{"zero_optimization": {"reduce_bucket_size": 1.5}}': ("reduce_bucket_size", "a whole number from 1"),
    '{"zero_optimization": {"overlap_comm": "maybe"}}': ("overlap_comm", "valid boolean"),
    '{"zero_optimization": {"overlap_comm": [1]}}': ("overlap_comm", "valid boolean"),
    '{"zero_optimization": {"offload_optimizer": {"device": "disk"}}}': ("offload_optimizer.device", "'cpu'"),
    '{"zero_optimization": {"offload_optimizer": "cpu"}}': ("offload_optimizer", ""),
    '{"zero_optimization": {"offload_param": {"devise": "cpu"}}}': ("offload_param.devise", "Extra inputs"),
    '{"zero_optimization": {"offload_param": {"buffer_count": "x"}}}': ("offload_param.buffer_count", "valid integer"),
    '{"zero_optimization": {"stage3_max_live_parameters": -5}}': ("max_live_parameters", "a whole number from 0"),
    '{"fp16": {"loss_scale": "big"}}': ("loss_scale", "must be a number"),
    '{"fp16": {"initial_scale_power": []}}': ("initial_scale_power", "valid integer"),
    '{"fp16": {"loss_scal": 1}}': ("loss_scal", ""),
    '{"comms_logger": {"enabled": "perhaps"}}': ("enabled", "valid boolean"),
    '{"flops_profiler": {"enabled": "perhaps"}}': ("", "DeepSpeed refuses it"),
    '{"tensorboard": {"enabled": "perhaps"}}': ("enabled", "valid boolean"),
    '{"compile": {"deepcompile": "perhaps"}}': ("deepcompile", "valid boolean"),
    '{"checkpoint": {"tag_validation": "sometimes"}}': ("", "DeepSpeed refuses it"),
    '{"zero_optimization": {"reduce_bucket_size": 0}}': ("reduce_bucket_size", "a whole number from 1"),
    '{"zero_optimization": {"allgather_bucket_size": 0}}': ("allgather_bucket_size", "a whole number from 1"),
    '{"zero_optimization": {"allgather_bucket_size": -1}}': ("allgather_bucket_size", "a whole number from 1"),
    '{"zero_optimization": {"sub_group_size": 0}}': ("sub_group_size", "a whole number from 1"),
    '{"zero_optimization": {"sub_group_size": -1}}': ("sub_group_size", "a whole number from 1"),
    '{"zero_optimization": {"zero_hpz_partition_size": 0}}': ("zero_hpz_partition_size", "a whole number from 1"),
    '{"zero_optimization": {"zero_hpz_partition_size": -1}}': ("zero_hpz_partition_size", "a whole number from 1"),
    '{"zero_optimization": {"reduce_bucket_size": 1180591620717411303424}}': (
        "reduce_bucket_size",
        "a whole number from 1",
    ),
    '{"zero_optimization": {"stage3_prefetch_bucket_size": -1}}': ("stage3_prefetch_bucket_size", "from 0"),
    '{"zero_optimization": {"stage3_prefetch_bucket_size": "auto"}}': ("stage3_prefetch_bucket_size", "is \"auto\""),
    '{"zero_optimization": {"stage3_param_persistence_threshold": -1}}': (
        "stage3_param_persistence_threshold",
        "from 0",
    ),
    '{"zero_optimization": {"stage3_max_reuse_distance": -1}}': ("stage3_max_reuse_distance", "from 0"),
    '{"zero_optimization": {"zero_hpz_partition_size": 3}}': (
        "zero_hpz_partition_size",
        "does not divide the 1 processes",
    ),
    '{"zero_optimization": {"elastic_checkpoint": true}}': ("elastic_checkpoint", "--resume"),
    '{"zero_optimization": {"stage": "auto"}}': ("stage", "--zero_stage"),
    '{"zero_optimization": {"stage": null}}': ("stage", "--zero_stage"),
    '{"zero_optimization": {"stage": 3.0}}': ("stage", "--zero_stage"),
    '{"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}': ("offload_optimizer", "nvme_path is missing"),
    '{"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/no/such"}}}': (
        "offload_param",
        "/no/such is not a folder",
    ),
    '{"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": 3}}}': ("offload_param", "3 is not"),
    '{"fp16": {"initial_scale_power": -1}}': ("initial_scale_power", "from 0 to 127"),
    '{"fp16": {"initial_scale_power": 9999}}': ("initial_scale_power", "from 0 to 127"),
    '{"fp16": {"loss_scale_window": 0}}': ("loss_scale_window", "from 1"),
    '{"fp16": {"loss_scale_window": -3}}': ("loss_scale_window", "from 1"),
    '{"fp16": {"min_loss_scale": -1}}': ("min_loss_scale", "from 0"),
    '{"fp16": {"hysteresis": 0}}': ("hysteresis", "from 1"),
    '{"fp16": {"auto_cast": true}}': ("auto_cast", "--dtype"),
    '{"bf16": {"enabled": "auto"}}': ("enabled", "--dtype"),
    '{"fp16": {"loss_scale": -1}}': ("loss_scale", "from 0"),
    '{"activation_checkpointing": {"cpu_checkpointing": "yes"}}': ("cpu_checkpointing", "true or false, not a string"),
    '{"activation_checkpointing": {"number_checkpoints": "x"}}': (
        "number_checkpoints",
        "must be a number, not a string",
    ),
    '{"activation_checkpointing": {"number_checkpoints": 0}}': ("number_checkpoints", "from 1"),
    '{"activation_checkpointing": {"profile": 1}}': ("profile", "true or false, not a number"),
    '{"aio": {"block_size": "x"}}': ("block_size", "must be a number, not a string"),
    '{"aio": {"queue_depth": -1}}': ("queue_depth", "from 1"),
    '{"aio": {"thread_count": 1.5}}': ("thread_count", "a whole number"),
    '{"aio": {"overlap_events": "x"}}': ("overlap_events", "true or false"),
    '{"flops_profiler": {"profile_step": -1}}': ("profile_step", "from 0"),
    '{"hybrid_engine": {"enabled": true}}': ("enabled", "--rollout_engine"),
    '{"data_efficiency": {"enabled": true}}': ("enabled", "--data_path"),
    '{"checkpoint": {"load_universal": true}}': ("load_universal", "--resume"),
    '{"tensor_parallel": {"autotp_size": 2}}': ("autotp_size", "tensor parallelism is not supported"),
    '{"steps_per_print": 0}': ("steps_per_print", "from 1"),
    '{"steps_per_print": -1}': ("steps_per_print", "from 1"),
    '{"steps_per_print": 1.5}': ("steps_per_print", "a whole number"),
    '{"gradient_predivide_factor": 0}': ("gradient_predivide_factor", "a number from"),
    '{"gradient_predivide_factor": -1}': ("gradient_predivide_factor", "a number from"),
    '{"zero_allow_untested_optimizer": false}': ("zero_allow_untested_optimizer", "torch's AdamW"),
    '{"zero_force_ds_cpu_optimizer": true}': ("zero_force_ds_cpu_optimizer", "torch's AdamW"),
    '{"train_batch_size": "auto"}': ("train_batch_size", "--per_device_train_batch_size"),
    '{"gradient_clipping": null}': ("gradient_clipping", "--max_grad_norm"),
}  # fmt: skip


@pytest.mark.parametrize("content", DEEPSPEED)
def test_an_invalid_deepspeed_config_is_reported_with_its_key_and_the_owning_flag_or_the_reason(content, tmp_path):
    key, part = DEEPSPEED[content]
    file = tmp_path / "deepspeed.json"
    file.write_text(content)
    (line,) = mistakes("sft", "--deepspeed_config", str(file))
    assert line.startswith(f"  - --deepspeed_config {file}: ") and key in line and part in line, line


def test_valid_deepspeed_configs_are_accepted(tmp_path):
    file = tmp_path / "deepspeed.json"
    valid = [
        "{}", '{"bf16": {"enabled": true}}', '{"fp16": {"enabled": false, "loss_scale_window": 100}}',
        '{"zero_optimization": {"overlap_comm": false, "reduce_bucket_size": 500000}}',
        '{"wall_clock_breakdown": true}',
        '{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}', '{"aio": {"block_size": 1048576}}',
        '{"activation_checkpointing": {"partition_activations": true}}', '{"steps_per_print": 10}',
    ]  # fmt: skip
    for content in valid:
        file.write_text(content)
        for step in ("sft", "dpo", "ppo"):
            assert mistakes(step, "--deepspeed_config", str(file)) == [], content

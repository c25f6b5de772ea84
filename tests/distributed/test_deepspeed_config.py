"""The DeepSpeed configuration built from a step's flags."""

import json

import pytest
import torch

from dschat.distributed.deepspeed_config import DTYPES, frozen_config, training_config, with_overrides

PLAIN = {"dtype": "bf16", "zero_stage": 2, "micro_batch_size": 4, "gradient_accumulation_steps": 3, "world_size": 5,
         "max_grad_norm": 1.0}  # fmt: skip


def config(**changes) -> dict:
    return training_config(**(PLAIN | changes))


def test_the_global_batch_is_the_product_that_deepspeed_checks():
    built = config()
    assert built["train_micro_batch_size_per_gpu"] == 4 and built["gradient_accumulation_steps"] == 3
    assert built["train_batch_size"] == 4 * 3 * 5
    frozen = frozen_config(dtype="bf16", zero_stage=0, micro_batch_size=4, world_size=5)
    assert frozen["train_batch_size"] == 4 * 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_at_most_one_precision_is_enabled(dtype):
    for built in (config(dtype=dtype), frozen_config(dtype=dtype, zero_stage=3, micro_batch_size=1, world_size=1)):
        enabled = {name for name in ("bf16", "fp16") if built[name]["enabled"]}
        assert enabled == ({dtype} - {"fp32"})
    assert DTYPES[dtype] == getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[dtype])


def test_bf16_accumulates_gradients_in_float32_where_zero_can():
    assert config()["data_types"]["grad_accum_dtype"] == "fp32"
    assert "data_types" not in config(dtype="fp32") and "data_types" not in config(zero_stage=0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", [False, True])
def test_offload_covers_the_states_that_the_stage_partitions(stage, offload):
    zero = config(zero_stage=stage, offload=offload)["zero_optimization"]
    assert zero["stage"] == stage
    assert ("offload_optimizer" in zero) == (offload and stage >= 1)
    assert ("offload_param" in zero) == (offload and stage == 3)
    for name in ("offload_optimizer", "offload_param"):
        assert zero.get(name, {"device": "cpu"})["device"] == "cpu"


@pytest.mark.parametrize(
    "stage, ranks, offload, expected",
    [(2, 1, False, 1), (2, 2, False, 2), (2, 1, True, 2), (0, 1, False, 0), (1, 1, False, 1), (3, 1, False, 3)],
)
def test_stage_2_of_one_rank_is_stage_1_unless_gradients_are_offloaded(stage, ranks, offload, expected):
    built = config(zero_stage=stage, world_size=ranks, offload=offload)
    assert built["zero_optimization"]["stage"] == expected


@pytest.mark.parametrize(
    "stage, offload, expected", [(0, False, 0), (1, False, 0), (2, False, 0), (3, False, 3), (0, True, 3), (3, True, 3)]
)
def test_a_frozen_model_uses_stage_0_or_stage_3(stage, offload, expected):
    """Stages 1 and 2 partition gradients and optimizer states, which it lacks; only stage 3 can offload parameters."""
    zero = frozen_config(dtype="bf16", zero_stage=stage, micro_batch_size=1, world_size=1, offload=offload)
    assert zero["zero_optimization"]["stage"] == expected
    assert ("offload_param" in zero["zero_optimization"]) == offload


def test_overrides_are_merged_key_by_key(tmp_path):
    file = tmp_path / "overrides.json"
    overrides = {"gradient_clipping": 7.0, "zero_optimization": {"overlap_comm": False}, "wall_clock_breakdown": True}
    file.write_text(json.dumps(overrides))
    plain, merged = config(zero_stage=3), with_overrides(config(zero_stage=3), str(file))
    assert merged["gradient_clipping"] == 7.0 and merged["wall_clock_breakdown"] is True
    assert merged["zero_optimization"] == plain["zero_optimization"] | {"overlap_comm": False}
    assert with_overrides(plain, None) == plain
    untouched = plain.keys() - overrides.keys()
    assert {name: merged[name] for name in untouched} == {name: plain[name] for name in untouched}


def test_an_override_of_another_type_replaces_a_group(tmp_path):
    file = tmp_path / "overrides.json"
    file.write_text(json.dumps({"bf16": None, "zero_optimization": {"offload_optimizer": {"device": "nvme"}}}))
    merged = with_overrides(config(offload=True), str(file))
    assert merged["bf16"] is None
    offload = config(offload=True)["zero_optimization"]["offload_optimizer"]
    assert merged["zero_optimization"]["offload_optimizer"] == offload | {"device": "nvme"}

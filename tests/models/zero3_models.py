"""Two-rank torchrun program of test_weights: ZeRO-3 loading, training and export against one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import transformers as hf
from architectures import tiny_architecture
from tiny_models import left_and_right_padded, tiny_causal_lm, tiny_tokenizer

from dschat.models.causal_lm import TokenLogprobs, load_causal_lm, load_tokenizer
from dschat.models.lora import add_lora, optimizer_groups
from dschat.models.scalar_head import TokenScores, last_token_scores, load_scalar_head
from dschat.models.weights import export_model, full_weights, is_partitioned

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(optimizer_groups(module, learning_rate=1e-3), lr=1e-3)


def engine_for(module: torch.nn.Module) -> deepspeed.DeepSpeedEngine:
    return deepspeed.initialize(model=module, optimizer=sgd(module), config=CONFIG)[0]


def assert_equal_weights(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], case: str) -> None:
    assert actual.keys() == expected.keys(), (case, actual.keys() ^ expected.keys())
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value.detach(), msg=lambda m, name=name: f"{case}: {name}: {m}")


def check_causal_lm(folder: Path, name: str, *, lora: bool, checkpointing: bool) -> None:
    case, rank, world = f"{name} lora={lora}", dist.get_rank(), dist.get_world_size()
    if rank == 0:
        tiny_causal_lm(name).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    dist.barrier()
    tokenizer = load_tokenizer(folder, add_eot_token=True)  # so embeddings grow

    def build(config: dict | None) -> TokenLogprobs:
        torch.manual_seed(0)
        torch.rand(rank)  # ranks may have different random states
        model = load_causal_lm(
            folder,
            dtype=torch.float32,
            tokenizer=tokenizer,
            gradient_checkpointing=checkpointing,
            deepspeed_config=config,
        )
        assert any(is_partitioned(p) for p in model.parameters()) == (config is not None), case
        if lora:
            add_lora(model, dim=2, module_name="all", only_optimize_lora=True)
        return TokenLogprobs(model)

    engine, alone = engine_for(build(CONFIG)), build(None)
    start = {key: value.detach().clone() for key, value in full_weights(alone)}
    tokens, mask = left_and_right_padded()
    loss_mask = mask if rank == 0 else torch.zeros_like(mask)  # rank 1 has no token at all
    single = sgd(alone)
    for _ in range(2):
        engine.backward(engine(tokens, mask, loss_mask).sum())
        engine.step()
        single.zero_grad()
        (alone(tokens, mask, mask).sum() / world).backward()  # DeepSpeed averages over ranks
        single.step()
    expected = dict(full_weights(alone))
    assert any((expected[key] - start[key]).abs().max() > 1e-4 for key in start), case
    assert_equal_weights({key: value.detach().clone() for key, value in full_weights(engine)}, expected, case)
    partitioned = [p.ds_tensor.clone() for p in engine.parameters()]
    export_model(engine, folder / "out", tokenizer)
    assert all(p.ds_tensor.equal(before) for p, before in zip(engine.parameters(), partitioned, strict=True)), case
    plain = hf.AutoModelForCausalLM.from_pretrained(folder / "out")
    assert_equal_weights(dict(plain.named_parameters()), expected, case)
    # The engine still works after parameters came and went.
    with torch.no_grad():
        torch.testing.assert_close(engine(tokens, mask, mask), alone(tokens, mask, mask), atol=1e-4, rtol=1e-4)


def check_scalar_head(folder: Path) -> None:
    torch.manual_seed(0)
    model = load_scalar_head(folder, dtype=torch.float32, tokenizer=tiny_tokenizer(), deepspeed_config=CONFIG)
    assert all(is_partitioned(p) for p in model.parameters())
    engine = engine_for(TokenScores(model))
    torch.manual_seed(0)
    alone = TokenScores(load_scalar_head(folder, dtype=torch.float32, tokenizer=tiny_tokenizer()))
    actual = {key: value.detach().clone() for key, value in full_weights(engine)}
    assert_equal_weights(actual, dict(full_weights(alone)), "scalar head")
    tokens, mask = left_and_right_padded()
    torch.testing.assert_close(
        last_token_scores(engine(tokens, mask), mask), alone.sequence_scores(tokens, mask), atol=1e-4, rtol=1e-4
    )


def check_refusals(folder: Path) -> None:
    """Models are verified under ZeRO-3 too: the head, and that padding has no effect."""
    for kind, reason in (
        ("rwkv", "cannot load a rwkv"), ("recurrent_gemma", "left-padded"), ("roberta", "later tokens"), ("mamba", None)
    ):  # fmt: skip
        model_folder = folder / kind
        if dist.get_rank() == 0:
            tiny_architecture(kind).save_pretrained(model_folder)
        dist.barrier()
        try:
            model = load_causal_lm(model_folder, dtype=torch.bfloat16, deepspeed_config=CONFIG)
            message = None
            assert all(is_partitioned(p) for p in model.parameters()), kind
        except ValueError as error:
            message = str(error)
        assert (message is None) if reason is None else (reason in str(message)), (kind, message)


def check_nonfinite(folder: Path) -> None:
    """A NaN in the partition of one rank is refused by all; the padding of the last partition is not checked."""
    for name in ("model.embed_tokens.weight", "model.norm.weight"):  # 67 · 16 values over 2 ranks, 16 values
        for index in (0, -1):
            model_folder = folder / f"{name}{index}"
            if dist.get_rank() == 0:
                model = tiny_causal_lm("llama")
                with torch.no_grad():
                    model.get_parameter(name).view(-1)[index] = torch.nan
                model.save_pretrained(model_folder)
            dist.barrier()
            for load in (load_causal_lm, load_scalar_head):
                try:
                    load(model_folder, dtype=torch.float32, deepspeed_config=CONFIG)
                    message = "none"
                except ValueError as error:
                    message = str(error)
                assert f"the tensor {name} in model.safetensors has NaN" in message, (name, index, message)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed.init_distributed("gloo")
    check_causal_lm(root / "llama", "llama-tied", lora=False, checkpointing=True)
    check_causal_lm(root / "gpt2", "gpt2", lora=True, checkpointing=True)
    check_scalar_head(root / "llama")
    check_refusals(root)
    check_nonfinite(root)
    print("all equal", flush=True)
    dist.destroy_process_group()

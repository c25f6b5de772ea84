"""Switching between training and generation: borrowed weights, freed memory, and unchanged parameters."""

import copy
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
import transformers
from torch import Tensor, nn

from dschat.generation import HybridEngine, SamplingParams
from dschat.models.causal_lm import TokenLogprobs
from dschat.models.lora import add_lora

PROMPTS = [[5, 6, 7], [9], [3, 4, 8, 8, 1, 2, 0, 9, 9], [5, 6, 7], [11, 12]]
GREEDY = {"max_new_tokens": 10, "eos_token_ids": None, "pad_token_id": 0, "sampling": SamplingParams(0)}
LEARNING_RATE = 0.02
SAMPLED = {"max_new_tokens": 10, "eos_token_ids": list(range(0, 97, 8)), "pad_token_id": 0, "seed": 5}


def tiny_llama(**changes) -> transformers.PreTrainedModel:
    settings = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**settings, **changes}))


def tiny_gpt2(**changes) -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3, eos_token_id=None
    )
    config.update(changes)
    return transformers.GPT2LMHeadModel(config)


def with_lora(model: nn.Module, *, strength: float = 0.3) -> nn.Module:
    """Adapters as training would leave them: B is not zero."""
    add_lora(model, dim=4, module_name="all", only_optimize_lora=True, dropout=0.3)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            values = torch.randn(parameter.shape, generator=generator) * strength
            parameter.data.copy_(values)
    return model


def transformers_greedy(model: nn.Module, new_tokens: int = 10) -> list[list[int]]:
    """The training model's own generate, with adapters that are not merged."""
    was_training = model.training
    model.eval()
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0)
    model.train(was_training)
    return out[:, longest:].tolist()


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_bit_identical(model: nn.Module, before: dict[str, Tensor]) -> None:
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(value.view(torch.uint8), after[name].view(torch.uint8)), name


@pytest.mark.parametrize("family", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("lora", [False, True])
def test_greedy_tokens_equal_the_training_models_own_generate(family, lora):
    plain = transformers_greedy(family())
    model = with_lora(family()) if lora else family()
    expected = transformers_greedy(model)
    assert not lora or expected != plain, "adapters that change nothing prove nothing"
    actor = HybridEngine(TokenLogprobs(model))
    with actor.generation():
        assert actor.generate(PROMPTS, **GREEDY).responses() == expected


def test_generation_uses_neither_dropout_nor_gradient_checkpointing():
    model = with_lora(tiny_gpt2(resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5))
    expected = transformers_greedy(model)
    model.gradient_checkpointing_enable()
    model.config.use_cache = False  # as loading for checkpointing leaves it
    model.train()
    actor = HybridEngine(model)
    with actor.generation():
        assert actor.generate(PROMPTS, **GREEDY).responses() == expected
    assert all(module.training for module in model.modules())
    assert model.is_gradient_checkpointing


@pytest.mark.parametrize("tied", [False, True])
def test_unpartitioned_weights_are_aliased_and_released(tied):
    model = tiny_llama(tie_word_embeddings=tied)
    actor = HybridEngine(model)
    generation_model = actor._generation_module.module
    assert generation_model is not model and all(p.is_meta for p in generation_model.parameters())
    with actor.generation():
        trained = dict(model.named_parameters(remove_duplicate=False))
        aliased = dict(generation_model.named_parameters(remove_duplicate=False))
        assert trained.keys() == aliased.keys()
        assert all(trained[name].data_ptr() == aliased[name].data_ptr() for name in trained)
        assert (generation_model.lm_head.weight is generation_model.model.embed_tokens.weight) == tied
        actor.generate(PROMPTS, **GREEDY)
    assert all(p.is_meta for p in generation_model.parameters())
    assert (generation_model.lm_head.weight is generation_model.model.embed_tokens.weight) == tied
    assert not any(p.is_meta or p.grad is not None for p in model.parameters())


def test_with_adapters_only_the_adapted_weights_are_copied():
    model = with_lora(tiny_llama())
    actor = HybridEngine(model)
    generation_model = actor._generation_module.module
    addresses = {p.data_ptr() for p in model.parameters()}
    with actor.generation():
        copied = {name for name, p in generation_model.named_parameters() if p.data_ptr() not in addresses}
    assert copied == {name for name, _ in generation_model.named_parameters() if name.endswith("_proj.weight")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hundred_switches_leave_weights_with_adapters_bit_identical(dtype):
    model = with_lora(tiny_llama()).to(dtype)
    before = snapshot(model)
    actor = HybridEngine(TokenLogprobs(model))
    rollouts = []
    for _ in range(100):
        with actor.generation():
            rollouts.append(actor.generate([[5, 6]], max_new_tokens=1, eos_token_ids=None, pad_token_id=0))
    assert_bit_identical(model, before)
    assert torch.equal(rollouts[0].logprobs, rollouts[-1].logprobs)


def test_each_context_generates_with_the_current_weights():
    model = with_lora(tiny_llama())
    actor = HybridEngine(model)
    answers = []
    for _ in range(2):
        with actor.generation():
            answers.append(actor.generate(PROMPTS, **GREEDY).responses())
        assert answers[-1] == transformers_greedy(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name or "embed" in name:
                    parameter.mul_(-1)
    assert answers[0] != answers[1]


def test_generation_may_run_in_another_dtype():
    model = tiny_llama(tie_word_embeddings=True)
    before = snapshot(model)
    actor = HybridEngine(model, dtype=torch.bfloat16)
    with actor.generation():
        generation_model = actor._generation_module.module
        assert {p.dtype for p in generation_model.parameters()} == {torch.bfloat16}
        assert generation_model.lm_head.weight is generation_model.model.embed_tokens.weight
        rollout = actor.generate(PROMPTS, **GREEDY)
    half_model = copy.deepcopy(model)
    for parameter in half_model.parameters():  # not .bfloat16(), which would also round the rotary frequencies
        parameter.data = parameter.data.bfloat16()
    half = HybridEngine(half_model)
    with half.generation():
        assert half.generate(PROMPTS, **GREEDY).responses() == rollout.responses()
    assert rollout.logprobs.dtype == torch.float32
    assert_bit_identical(model, before)


def test_an_exception_inside_releases_the_weights_and_the_next_context_works():
    actor = HybridEngine(tiny_llama())
    with pytest.raises(KeyError), actor.generation():
        raise KeyError("whatever")
    assert all(p.is_meta for p in actor._generation_module.module.parameters())
    with actor.generation():
        assert actor.generate(PROMPTS, **GREEDY).response_mask.all()


def test_generating_outside_or_twice_inside_the_context_is_refused():
    actor = HybridEngine(tiny_llama())
    with pytest.raises(RuntimeError, match=r"with engine.generation\(\)"):
        actor.generate(PROMPTS, **GREEDY)
    with pytest.raises(RuntimeError, match=r"with engine.generation\(\)"):
        actor.stream([5], max_new_tokens=2, eos_token_ids=None)
    with actor.generation():
        with pytest.raises(RuntimeError, match="already entered"), actor.generation():
            pass
        assert actor.generate(PROMPTS, **GREEDY).response_mask.all(), "the outer context still works"
    with pytest.raises(ValueError, match="max_new_tokens is 0"), actor.generation():
        actor.generate(PROMPTS, **{**GREEDY, "max_new_tokens": 0})
    with pytest.raises(ValueError, match="Linear contains no Hugging Face model"):
        HybridEngine(nn.Linear(2, 2))


def test_a_model_that_differs_from_its_config_is_refused():
    model = tiny_llama()
    actor = HybridEngine(model)
    model.model.layers[0].mlp.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="differ in 2 names.*extra.bias"), actor.generation():
        pass
    assert all(p.is_meta for p in actor._generation_module.module.parameters())


def test_a_stream_inside_the_context_equals_generate():
    actor = HybridEngine(tiny_llama())
    with actor.generation():
        whole = actor.generate([PROMPTS[2]], **SAMPLED).responses()[0]
        assert (
            list(actor.stream(PROMPTS[2], max_new_tokens=10, eos_token_ids=SAMPLED["eos_token_ids"], seed=5)) == whole
        )


def roll_out_on_a_rank(rank: int, port: int, folder: str) -> None:
    """Each rank decodes its share of the prompts, unequal in number and length, then trains one step."""
    import os

    import deepspeed

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    share = slice(0, 3) if rank == 0 else slice(3, 5)
    answers = {}
    for stage in (0, 2, 3):
        for lora in (False, True):
            model = TokenLogprobs(with_lora(tiny_llama()) if lora else tiny_llama())
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": 0.0,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
                "zero_allow_untested_optimizer": True,
            }
            trained = [p for p in model.parameters() if p.requires_grad]
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=torch.optim.SGD(trained, lr=LEARNING_RATE),
                config=config,
                dist_init_required=False,
            )
            actor = HybridEngine(engine)
            pieces = [getattr(p, "ds_tensor", p).detach().clone() for p in model.parameters()]
            layerwise = HybridEngine(engine, layerwise=True, without=["kernels"])
            if rank == 0:  # the other has nothing to decode, and one more context
                with layerwise.generation():
                    rollout = layerwise.generate(PROMPTS[share], **SAMPLED, sample_ids=torch.arange(5)[share])
                    answers[stage, lora, "layerwise"] = rollout.responses()
                with pytest.raises(KeyError), layerwise.generation():
                    layerwise.generate([[5, 6]], max_new_tokens=2, eos_token_ids=None, pad_token_id=0)
                    raise KeyError("a fault of one rank")
            else:
                with layerwise.generation():
                    pass
                with layerwise.generation():
                    rollout = layerwise.generate(PROMPTS[share], **SAMPLED, sample_ids=torch.arange(5)[share])
                    answers[stage, lora, "layerwise"] = rollout.responses()
            for moment in ("before", "after"):
                with actor.generation():
                    ids = torch.arange(5)[share]
                    rollout = actor.generate(PROMPTS[share], **SAMPLED, sample_ids=ids)
                assert all(p.is_meta for p in actor._generation_module.module.parameters())
                answers[stage, lora, moment] = rollout.responses(), rollout.logprobs.tolist()
                if moment == "before":
                    now = [getattr(p, "ds_tensor", p).detach() for p in model.parameters()]
                    assert all(torch.equal(a, b) for a, b in zip(pieces, now, strict=True))
                    train_once(engine)
            engine.destroy()
    torch.save(answers, Path(folder) / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


def train_once(engine: nn.Module) -> None:
    """The same micro-batch on every rank, so that the averaged gradient is that of one process."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    real = torch.ones_like(ids, dtype=torch.bool)
    engine.eval()  # adapters have dropout, and the ranks' random states differ
    loss = -engine(ids, real, real).sum()
    if isinstance(engine, TokenLogprobs):
        loss.backward()
        with torch.no_grad():
            for parameter in engine.parameters():
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * parameter.grad
        return
    engine.backward(loss)
    engine.step()


def test_two_ranks_of_every_zero_stage_generate_what_one_process_generates(tmp_path):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(roll_out_on_a_rank, args=(port, str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for lora in (False, True):
        model = TokenLogprobs(with_lora(tiny_llama()) if lora else tiny_llama())
        actor = HybridEngine(model)
        rollouts = []
        for moment in ("before", "after"):
            with actor.generation():
                rollout = actor.generate(PROMPTS, **SAMPLED)
            rollouts.append(rollout.responses())
            for stage in (0, 2, 3):
                responses = [row for answers in ranks for row in answers[stage, lora, moment][0]]
                assert responses == rollout.responses(), (stage, lora, moment)
                if moment == "before":
                    layerwise = [row for answers in ranks for row in answers[stage, lora, "layerwise"]]
                    assert layerwise == rollout.responses(), (stage, lora, "layerwise")
                for row, logprobs in enumerate(row for answers in ranks for row in answers[stage, lora, moment][1]):
                    actual = torch.tensor(logprobs)[: len(responses[row])]
                    torch.testing.assert_close(actual, rollout.logprobs[row, : len(actual)], atol=1e-4, rtol=1e-4)
            train_once(model)
        assert rollouts[0] != rollouts[1], "a step that changes nothing would hide stale weights"

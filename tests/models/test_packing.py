"""Rows without padding, with prompts computed once, have the log-probs, scores and gradients of padded ones."""

import numpy as np
import pytest
import torch
from architectures import tiny_architecture
from datasets import Dataset
from packed_models import FULL, MODELS, PADDED, conversations, enabled, network_of
from tiny_models import VOCABULARY, tiny_classifier, tiny_tokenizer

from dschat.data.collators import collate_sft
from dschat.data.packing import packed
from dschat.losses.sft import sft_loss
from dschat.models.backbone import Packing
from dschat.models.causal_lm import TokenLogprobs, load_causal_lm
from dschat.models.scalar_head import TokenScores

# By model type: windows and chunks shorter than the tests' rows, soft-capped logits, attention sinks, latent attention,
# differential attention, experts, rotations of every kind.
PACKED = [
    "cohere2", "dbrx", "deepseek_v2", "deepseek_v3", "diffllama", "gemma", "gemma2", "gemma3_text", "gemma3n_text",
    "gemma4_text", "glm4_moe_lite", "gpt2", "gpt_neox", "gpt_oss", "jetmoe", "llama", "llama4_text", "longcat_flash",
    "minicpm3", "mistral", "moshi", "olmo3", "opt", "phimoe", "qwen2", "qwen3", "qwen3_moe", "youtu",
]  # fmt: skip
RELATIVE = {"gemma4_text": 1e-4}  # sums of many terms that cancel: 3e-5 by rounding


def rows_with_equal_prompts(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, attention and loss mask [7, 22]: two prompts with three responses each, and a row of its own.

    Padded on the left, right, both sides or not at all; responses of 1 to 12 tokens, one with a gap in its loss.
    """
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(vocabulary, (length,), generator=generator) for length in (9, 3, 8)]
    shape = [(0, 0, 12), (1, 2, 1), (0, 1, 4), (2, 3, 5), (1, 0, 12), (0, 9, 4), (1, 4, 7)]  # prompt, left, response
    ids, mask = torch.full((len(shape), 22), 1), torch.zeros(len(shape), 22, dtype=torch.bool)
    loss_mask = mask.clone()
    for row, (prompt, left, response) in enumerate(shape):
        tokens = torch.cat([prompts[prompt], torch.randint(vocabulary, (response,), generator=generator)])
        ids[row, left : left + len(tokens)], mask[row, left : left + len(tokens)] = tokens, True
        loss_mask[row, left + len(prompts[prompt]) : left + len(tokens)] = True
    loss_mask[4, 6:8] = False
    return ids, mask, loss_mask


def outputs_and_gradients(network, call):
    """The outputs [·] of call(), and the gradient of their sum with fixed random weights, by parameter."""
    network.zero_grad(set_to_none=True)
    outputs = torch.cat([output.flatten() for output in call()])
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(6))
    (outputs * weights).sum().backward()
    return outputs.detach(), {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}


def assert_close_gradients(actual, expected, *, relative: float) -> None:
    """Each within `relative` of the parameter's largest gradient; parameters that cancel, of the model's median one."""
    assert actual.keys() == expected.keys()
    sizes = {name: float(gradient.abs().max()) for name, gradient in expected.items()}
    typical = float(np.median([size for size in sizes.values() if size]))
    for name, gradient in expected.items():
        error = float((actual[name] - gradient).abs().max())
        assert error <= relative * max(sizes[name], typical), (name, error, sizes[name], typical)


def tokens_embedded(network) -> list[int]:
    """Tokens of each forward pass from now on."""
    passes: list[int] = []
    network.model.get_input_embeddings().register_forward_pre_hook(lambda _, args: passes.append(args[0].numel()))
    return passes


def run_padded_and_packed(network, call):
    """Outputs and gradients: padded, packed, and packed by C++ kernels; the network is packed by them afterwards."""
    packing, network.backbone.packing = network.packing, PADDED
    network.backbone.aligns_left = False
    padded = outputs_and_gradients(network, call)
    network.backbone.packing = packing
    packed_rows = outputs_and_gradients(network, call)
    network.backbone.use_cpu_kernels()
    return padded, [packed_rows, outputs_and_gradients(network, call)]


@pytest.mark.parametrize("kind", PACKED)
def test_packed_rows_with_shared_prompts_have_the_logprobs_and_gradients_of_padded_ones(kind, caplog):
    """Of 7 · 22 columns 89 hold real tokens, 65 if the prompts of 9 and 3 tokens are computed once instead of thrice.

    The tolerance of a gradient is 1e-5 of the parameter's largest (or of a typical one, where all of them cancel).
    """
    network = TokenLogprobs(tiny_architecture(kind))
    assert enabled(network, caplog) == [] and network.packing == FULL
    ids, mask, loss_mask = rows_with_equal_prompts(97)
    passes = tokens_embedded(network)
    (expected, gradients), ways = run_padded_and_packed(network, lambda: network(ids, mask, loss_mask, 0.7, True))
    assert passes == [7 * 22, 65, 65]
    for actual, others in ways:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)
        assert_close_gradients(others, gradients, relative=RELATIVE.get(kind, 1e-5))
    network.backbone.packing = Packing(remove_padding=True)
    torch.testing.assert_close(
        network(ids, mask, loss_mask, 0.7).flatten(), expected[: ids.numel()], rtol=1e-5, atol=2e-5
    )
    assert passes[3:] == [89]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mistral with a window"])
def test_recomputed_layers_attend_inside_the_same_sequences(name, caplog, tmp_path):
    network_of(name).model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    ids, mask, loss_mask = rows_with_equal_prompts(VOCABULARY)
    results = []
    for checkpointing in (False, True):
        model = load_causal_lm(tmp_path, dtype=torch.float32, gradient_checkpointing=checkpointing)
        network = TokenLogprobs(model).train()
        network.backbone.use_cpu_kernels()
        assert enabled(network, caplog) == []
        results.append(outputs_and_gradients(network, lambda network=network: [network(ids, mask, loss_mask)]))
    (expected, gradients), (actual, others) = results
    assert torch.equal(actual, expected)
    assert_close_gradients(others, gradients, relative=1e-6)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gpt2"])
def test_kernels_in_bf16_are_as_close_to_float32_as_torchs_are(kind, caplog):
    """They round elsewhere, so they are not equal to torch's; the mean of several batches."""
    ids, mask, loss_mask = rows_with_equal_prompts(97)
    exact = TokenLogprobs(tiny_architecture(kind))
    networks = {name: TokenLogprobs(tiny_architecture(kind).to(torch.bfloat16)) for name in ("torch", "kernels")}
    networks["kernels"].backbone.use_cpu_kernels()
    errors = {name: [] for name in networks}
    for seed in range(6):
        batch = (ids + 13 * seed) % 97, mask, loss_mask
        expected, gradients = outputs_and_gradients(exact, lambda batch=batch: [exact(*batch)])
        for name, network in networks.items():
            network.backbone.packing = FULL
            actual, others = outputs_and_gradients(network, lambda n=network, batch=batch: [n(*batch)])
            distances = [float((others[n] - g).norm() / g.norm().clamp(min=1e-3)) for n, g in gradients.items()]
            errors[name].append((float((actual - expected).norm()), sum(distances)))
    plain, by_kernels = np.mean(errors["torch"], axis=0), np.mean(errors["kernels"], axis=0)
    assert (by_kernels <= 1.15 * plain).all(), (by_kernels, plain)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gemma2", "qwen3", "mistral"])
def test_scores_and_their_gradients_are_those_of_padded_rows(name, caplog):
    network = TokenScores(tiny_classifier(name))
    assert enabled(network, caplog) == [] and network.packing == FULL
    ids, mask, loss_mask = rows_with_equal_prompts(VOCABULARY)
    prompts = torch.tensor([9, 3, 9, 8, 3, 9, 3])
    passes = tokens_embedded(network)
    (expected, gradients), ways = run_padded_and_packed(
        network, lambda: [network(ids, mask, prompt_lengths=prompts)[mask], network.sequence_scores(ids, mask, prompts)]
    )
    assert passes == [7 * 22] * 2 + [65] * 4
    for actual, others in ways:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)
        assert_close_gradients(others, gradients, relative=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_over_packed_rows_has_the_loss_and_gradient_of_its_conversations_alone(name, caplog, tmp_path):
    """Where the model runs rows without padding, and where each conversation becomes a padded row."""
    network = network_of(name)
    enabled(network, caplog)
    rows = conversations()
    packed_rows = list(packed(Dataset.from_list(rows), capacity=24, seed=0, identity="", folder=str(tmp_path)))
    assert len(packed_rows) < len(rows) and max(len(row["conversation_lengths"]) for row in packed_rows) > 1
    tokens = sum(sum(row["loss_mask"]) for row in rows)

    def losses(batches):
        for batch in (collate_sft(b, pad_token_id=0) for b in batches if b):
            logprobs = network(
                batch["input_ids"], batch["attention_mask"], batch["loss_mask"],
                packed_positions=batch.get("packed_positions"),
            )  # fmt: skip
            yield sft_loss(logprobs, batch["loss_mask"], normalizer=tokens)[0][None]

    results = {}
    for packing in {network.packing, PADDED}:
        network.backbone.packing = PADDED
        alone, gradients = outputs_and_gradients(network, lambda: [sum(losses([[row] for row in rows]))])
        network.backbone.packing = packing
        together, others = outputs_and_gradients(network, lambda: [sum(losses([packed_rows[:2], packed_rows[2:]]))])
        assert float(together) == pytest.approx(float(alone), rel=1e-5)
        assert_close_gradients(others, gradients, relative=2e-5)
        results[packing] = together
    assert (FULL in results) == (name not in ("falcon with ALiBi", "mpt", "mamba"))

"""Verifies at load time, on a few tokens, that a model is causal and that TokenLogprobs matches its logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat.models.backbone import evaluation_mode
from dschat.models.layer_weights import run_with_full_weights
from dschat.models.weights import full_shape
from dschat.models.windows import short_windows
from dschat.tensors import logprobs_of

TRIAL_TOKENS = 12
PREFIX_TOKENS = 7  # of these, in the padded rows

# (input_ids, attention_mask, loss_mask), [B, S] each → log-probs [B, S].
Logprobs = Callable[[Tensor, Tensor, Tensor], Tensor]


@torch.no_grad()
def verify_logprobs(model: PreTrainedModel, token_logprobs: nn.Module) -> None:
    """Compare TokenLogprobs on unpadded, left-padded and right-padded rows with the model's own logits of one row.

    Attention windows are shortened, since padding may matter only beyond their length. Weights are gathered and cast to
    float32 one layer at a time, so that differences are not caused by rounding. A model that cannot run this way is
    gathered as a whole and compared in its own dtype. A collective under ZeRO-3. Models on the meta device are not
    checked.

    Args:
        model: as it will be trained; its train/eval mode is restored.
        token_logprobs: TokenLogprobs of the model.

    Raises:
        ValueError: the model cannot be run as a causal language model, its logits for a token depend on later tokens,
            it transforms its logits in a way `head_transform` does not cover, or log-probs depend on padding.
    """
    if any(p.is_meta for p in model.parameters()):
        return
    with evaluation_mode(token_logprobs), short_windows(model):
        problem = _find_problem(model, token_logprobs)
    if problem is not None:
        raise ValueError(f"{type(model).__name__}: {problem}")


def _find_problem(model: PreTrainedModel, token_logprobs: nn.Module) -> str | None:
    try:
        return run_with_full_weights(token_logprobs, model.dtype, partial(_first_problem, model, token_logprobs))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any error of the model's own code: not supported
        return (
            f"it cannot be run as a causal language model on a batch of token ids "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}): "
            "choose a causal decoder."
        )


def _first_problem(model: PreTrainedModel, token_logprobs: Logprobs, dtype: torch.dtype) -> str | None:
    """Describes the first failed check, or None."""
    embeddings = model.get_input_embeddings()
    vocabulary, device = full_shape(embeddings.weight)[0], embeddings.weight.device
    tokens = torch.randint(vocabulary, (1, TRIAL_TOKENS), generator=torch.Generator().manual_seed(0)).to(device)
    expected, largest = _model_logprobs(model, tokens)  # [n - 1]
    # Logits are rounded relative to their magnitude (2⁻⁸ in bf16, TF32 sums in fp32), in some models twice.
    tolerance = max(1e-3, 4 * torch.finfo(dtype).eps) * max(1.0, largest)
    rows, mask = _padded_rows(tokens)
    logprobs = token_logprobs(rows, mask, mask).float()  # [3, n]
    unpadded = logprobs[0, 1:] - expected
    left = logprobs[1, 1 - PREFIX_TOKENS :] - expected[: PREFIX_TOKENS - 1]
    right = logprobs[2, 1:PREFIX_TOKENS] - expected[: PREFIX_TOKENS - 1]
    problem = None
    if not _is_small(unpadded, tolerance, dtype) or not _is_small(right, tolerance, dtype):
        prefix, _ = _model_logprobs(model, tokens[:, :PREFIX_TOKENS])
        if not _is_small(prefix - expected[: PREFIX_TOKENS - 1], tolerance, dtype):
            problem = (
                "its logits for a token depend on later tokens, so it is an encoder, not a causal language model, or "
                "a decoder whose config lacks is_decoder: choose a causal decoder."
            )
        else:
            worst = max(unpadded.abs().max().item(), right.abs().max().item())
            problem = (
                f"log-probs from hidden states differ from the model's own logits by {worst:.3g} "
                f"(tolerance {tolerance:.3g}), so it changes its logits in a way that this suite does not implement: "
                "add it to head_transform in dschat/models/causal_lm.py."
            )
    elif not _is_small(left, tolerance, dtype):
        problem = (
            f"log-probs of a left-padded row differ from those of the row alone by {left.abs().max().item():.3g} "
            f"(tolerance {tolerance:.3g}): it attends to padding, but prompts of a batch are padded on the "
            "left. Choose another architecture."
        )
    return problem


def _model_logprobs(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, float]:
    """Log-probs [n − 1] of tokens [1, n] except the first, from the model's own logits; and the largest |logit|."""
    mask = torch.ones_like(tokens)
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    return logprobs_of(logits[0, :-1], tokens[0, 1:]).float(), logits.abs().max().item()


def _padded_rows(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Batch of the row [1, n] and its prefix left-padded and right-padded: ids and mask [3, n]."""
    padding = tokens.shape[1] - PREFIX_TOKENS
    prefix, mask = tokens[0, :PREFIX_TOKENS], torch.ones_like(tokens, dtype=torch.bool).repeat(3, 1)
    # Real tokens as padding, so that attending to padding changes the result.
    filler = tokens[0, PREFIX_TOKENS:].flip(0)
    mask[1, :padding] = False
    mask[2, PREFIX_TOKENS:] = False
    return torch.stack([tokens[0], torch.cat([filler, prefix]), torch.cat([prefix, filler])]), mask


def _is_small(difference: Tensor, tolerance: float, dtype: torch.dtype) -> bool:
    """Whether differences are within tolerance: the maximum in float32, the median in half precision, where rounding
    may route a token to another expert."""
    size = difference.abs()
    return bool((size.max() if dtype == torch.float32 else size.median()) <= tolerance)

"""Forward passes over a rollout: old and reference log-probs, entropies and values of its response tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from dschat.data.micro_batches import forward_in_micro_batches
from dschat.generation import Rollout
from dschat.rlhf.rlhf_engine import DeepSpeedRLHFEngine

OldLogprobs = Literal["recompute", "rollout", "update"]


@dataclass(frozen=True, kw_only=True)
class ModelOutputs:
    """Outputs of actor, reference model and critic on the response tokens of a rollout, each [B, T].

    Attributes:
        old_logprobs, entropy: of the actor, nats; None where the update computes them.
        ref_logprobs: of the reference model, nats; None without one.
        values: V of the state before each response token; None without a critic, or where its update computes them.
    """

    old_logprobs: Tensor | None
    entropy: Tensor | None
    ref_logprobs: Tensor | None
    values: Tensor | None


def compute_model_outputs(
    engine: DeepSpeedRLHFEngine, rollout: Rollout, *, old_logprobs: OldLogprobs, with_values: bool, temperature: float
) -> ModelOutputs:
    """Forward passes of all models with dropout off. A collective under ZeRO-3.

    Args:
        old_logprobs: "rollout" uses the decoder's log-probs instead of a forward pass of the actor, "update" none.
        with_values: whether the critic runs, if there is one.
        temperature: of sampling.
    """
    mask = rollout.response_mask
    rows = {"input_ids": rollout.sequences, "attention_mask": rollout.attention_mask}
    with_loss_mask = rows | {"loss_mask": F.pad(mask, (rollout.prompt_length, 0))}  # [B, P+T]
    logprobs = entropy = ref_logprobs = values = None
    if old_logprobs == "rollout":
        logprobs, entropy = rollout.logprobs, -rollout.logprobs  # E[−log q] over samples of q is its entropy
    elif old_logprobs == "recompute":
        logprobs, entropy = policy_logprobs(engine, with_loss_mask, response_mask=mask, temperature=temperature)
    with engine.reference() as reference:
        if reference is not None:
            outputs = forward_in_micro_batches(
                reference, with_loss_mask, temperature=temperature, limit=engine.limit_of(reference)
            )
            ref_logprobs = response_columns(outputs, mask)
    if engine.critic is not None and with_values:
        engine.critic.eval()
        with_prompts = rows | {"prompt_lengths": rollout.prompt_lengths}
        outputs = forward_in_micro_batches(engine.critic, with_prompts, limit=engine.limit_of(engine.critic))
        values = state_columns(outputs, mask)
    return ModelOutputs(old_logprobs=logprobs, entropy=entropy, ref_logprobs=ref_logprobs, values=values)


def policy_logprobs(
    engine: DeepSpeedRLHFEngine, rows: Mapping[str, Tensor], *, response_mask: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [B, T] of the policy, with dropout off. A collective under ZeRO-3.

    Args:
        rows: input_ids, attention_mask and loss_mask [B, P+T].
        response_mask: [B, T] bool.
    """
    engine.policy.eval()
    logprobs, entropy = forward_in_micro_batches(
        engine.policy, rows, temperature=temperature, with_entropy=True, limit=engine.limit_of(engine.policy)
    )  # [B, P+T] each
    return response_columns(logprobs, response_mask), response_columns(entropy, response_mask)


def response_columns(per_token: Tensor, response_mask: Tensor) -> Tensor:
    """[B, P+T] → [B, T]: the columns of the response tokens."""
    return per_token[:, -response_mask.shape[1] :]


def state_columns(per_token: Tensor, response_mask: Tensor) -> Tensor:
    """[B, P+T] → [B, T]: the column before each response token; the state before token t ends at column P + t − 1."""
    return per_token[:, -response_mask.shape[1] - 1 : -1]

"""Causal language models: loading, and token log-probs without a [B, S, V] logits tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from dschat.data.chat_template import stop_token_ids
from dschat.models.backbone import Backbone, Packing, backbone_of
from dschat.models.loading import LoadOptions, load_pretrained
from dschat.models.packed.rows import prompt_lengths_of
from dschat.models.tokenizer import load_tokenizer
from dschat.models.verification import verify_logprobs
from dschat.tensors import linear_logprobs

__all__ = ["LogprobHead", "TokenLogprobs", "head_transform", "load_causal_lm", "load_tokenizer", "verify_head"]


def load_causal_lm(
    path: str | Path,
    *,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dropout: float | None = None,
    gradient_checkpointing: bool = False,
    deepspeed_config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load any AutoModelForCausalLM for training or scoring; wrap it in `TokenLogprobs` before creating an engine.

    Args:
        path: folder or hub name of a model with weights.
        dtype: of the parameters.
        tokenizer: embeddings grow to its size (never shrink), and its EOS and pad ids are set in the generation config.
        dropout: probability in [0, 1) for every dropout field of the config; None keeps the config's values.
        gradient_checkpointing: recompute activations of each layer in backward.
        deepspeed_config: the config of the engine that will wrap the model; under ZeRO stage 3 weights are partitioned
            while loading, which is a collective: all ranks call this together.
        trust_remote_code: run Python code that comes with the folder or hub repository.

    Raises:
        ValueError: no model or weights at the path, missing or not finite weights, invalid dropout, or a head that
            TokenLogprobs does not support.
    """
    options = LoadOptions(
        dtype=dtype,
        tokenizer=tokenizer,
        dropout=dropout,
        gradient_checkpointing=gradient_checkpointing,
        deepspeed_config=deepspeed_config,
        trust_remote_code=trust_remote_code,
    )
    model = load_pretrained(AutoModelForCausalLM, path, options)
    if tokenizer is not None:
        set_generation_tokens(model, tokenizer)
    verify_head(model)
    return model


def set_generation_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the stop ids to the generation config, so that `generate` of the exported model stops where rollouts do.

    These are the tokenizer's EOS and the template's end of turn: ChatML has <|im_end|> besides an EOS <|endoftext|>.
    """
    generation = model.generation_config
    configured = generation.eos_token_id
    configured = [] if configured is None else [configured] if isinstance(configured, int) else list(configured)
    stops = list(dict.fromkeys([*configured, *stop_token_ids(tokenizer)]))
    generation.eos_token_id = stops if len(stops) > 1 else stops[0]
    generation.pad_token_id = tokenizer.pad_token_id
    try:
        generation.validate(strict=True)
    except ValueError:
        # Some published models set sampling fields without do_sample, which makes saving a changed config fail.
        generation.do_sample = True


class LogprobHead(nn.Module):
    """Output projection that returns log-probs; shares the Parameters of the model's own head.

    It is a module because ZeRO-3 gathers parameters per module call: one call per forward gives the same number of
    collectives on every rank, however many tokens a rank scores.
    """

    def __init__(self, output_embeddings: nn.Module, *, scale: float, softcap: float | None) -> None:
        super().__init__()
        self.weight = output_embeddings.weight  # [V, H]
        self.bias = getattr(output_embeddings, "bias", None)  # [V]
        self.scale = scale
        self.softcap = softcap

    def forward(
        self, hidden: Tensor, labels: Tensor, temperature: float, with_entropy: bool, with_top: bool
    ) -> Tensor | tuple[Tensor, ...]:
        """hidden [N, H], labels [N] → logprobs [N] float32, or a tuple; see linear_logprobs."""
        return linear_logprobs(
            hidden,
            self.weight,
            labels,
            bias=self.bias,
            temperature=temperature,
            with_entropy=with_entropy,
            with_top=with_top,
            scale=self.scale,
            softcap=self.softcap,
        )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save nothing: the parameters are saved under the model's own names."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing: see `_save_to_state_dict`."""


class TokenLogprobs(nn.Module):
    """A causal LM whose forward returns log-probs of its input tokens; logits exist only in chunks of rows.

    `.model` is the Hugging Face model. Its `forward` is not used, so an engine around this module is enough for
    training and scoring, with any ZeRO stage.

    Raises:
        ValueError: the model has no separate backbone or no output embedding.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        output_embeddings = model.get_output_embeddings()
        body = backbone_of(model)
        if output_embeddings is None or body is None:
            raise ValueError(
                f"{type(model).__name__} has no output embedding separate from its backbone, but log-probs are "
                "computed from hidden states and that embedding: load a decoder with AutoModelForCausalLM."
            )
        scale, softcap = head_transform(model)
        self.model = model
        self.head = LogprobHead(output_embeddings, scale=scale, softcap=softcap)
        self.backbone = Backbone(model, body)

    @property
    def packing(self) -> Packing:
        """How the forward pass avoids padding; see dschat.models.backbone."""
        return self.backbone.packing

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        temperature: float = 1.0,
        with_entropy: bool = False,
        packed_positions: Tensor | None = None,
        with_top: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """Log p(token i | tokens < i) for the tokens selected by loss_mask.

        Tokens before the first selected one of a row are its prompt: rows with the same prompt may share it.

        Args:
            input_ids: [B, S] long, padded on either side.
            attention_mask: [B, S] bool, True on real tokens.
            loss_mask: [B, S] bool, True where a token's log-prob is computed; the first real token of a row has no
                prediction and counts as False. It may be all False: the result still has a graph, with zero gradients.
            temperature: logits are divided by it.
            with_entropy: also return the entropy of the distribution that predicts each token.
            packed_positions: [B, S] long, for rows of several conversations: restarts at 0 with each, 0 on padding
                (which is on the right). loss_mask must be False on the first token of each conversation.
            with_top: also return whether each token was the most likely one.

        Returns:
            logprobs [B, S] float32 in nats, zero for tokens not selected; or a tuple of logprobs, if wanted entropy
            [B, S], and if wanted is_top [B, S] bool, False for tokens not selected.
        """
        hidden, source = self.backbone(
            input_ids, attention_mask, prompt_lengths=prompt_lengths_of(loss_mask, attention_mask),
            starts=None if packed_positions is None else packed_positions == 0,
        )  # [N, H], [B · S]  # fmt: skip
        # The first real token of a row has no prediction, or one from padding: it is excluded.
        selected = nn.functional.pad(loss_mask[:, 1:] & attention_mask[:, :-1], (1, 0))  # [B, S]
        tokens = selected.flatten().nonzero().squeeze(1)  # [n]
        labels = input_ids.flatten()[tokens]
        # tokens - 1: the hidden state one column earlier predicts a token; same row, since column 0 is excluded.
        predicting = hidden.index_select(0, source[tokens - 1])
        outputs = self.head(predicting, labels, temperature, with_entropy, with_top)  # [n]

        def scatter(values: Tensor) -> Tensor:
            return values.new_zeros(selected.numel()).index_copy(0, tokens, values).view_as(selected)  # [B, S]

        return tuple(map(scatter, outputs)) if with_entropy or with_top else scatter(outputs)


def head_transform(model: PreTrainedModel) -> tuple[float, float | None]:
    """The model's scaling and soft-capping of logits after the projection: (scale, softcap), (1.0, None) for most.

    logits = softcap · tanh(scale · (h Wᵀ + b) / softcap). Taken from transformers' modelling files; `verify_head`
    rejects models with any other transform.
    """
    config = model.config.get_text_config()
    scale = 1.0
    # Cohere. From the model, not the config: MPT's config has an unused field of that name.
    if getattr(model, "logit_scale", None) is not None:
        scale *= float(model.logit_scale)
    if getattr(config, "logits_scaling", None) is not None:
        # Granite divides by it, HyperCLOVA X multiplies.
        scale *= config.logits_scaling if config.model_type.startswith("hyperclovax") else 1 / config.logits_scaling
    for name in ("lm_head_multiplier", "output_multiplier"):  # Falcon-H1; µP models
        scale *= getattr(config, name, None) or 1.0
    scale /= getattr(config, "logits_mup_width_multiplier", None) or 1.0  # Inkling
    return scale, getattr(config, "final_logit_softcapping", None)  # Gemma 2 and later


def verify_head(model: PreTrainedModel) -> None:
    """Compare TokenLogprobs with the model's own logits on a few tokens, padded and not; see `verify_logprobs`.

    Raises:
        ValueError: they differ, or the model is not a causal language model.
    """
    verify_logprobs(model, TokenLogprobs(model))

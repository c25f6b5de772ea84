"""Scalar-head models for critic and reward: a one-output classifier, applied to every token or the last one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dschat.models.backbone import Backbone, Packing
from dschat.models.loading import LoadOptions, load_pretrained, read_config
from dschat.models.weights import full_shape, gathered

logger = logging.getLogger(__name__)


def has_scalar_head(path: str | Path, *, trust_remote_code: bool = False) -> bool:
    """True if the folder (or hub name) is a saved classifier, False if it is a model that needs a new head.

    Raises:
        ValueError: no model at the path, or a classifier with more than one output.
    """
    return _is_classifier(read_config(path, trust_remote_code=trust_remote_code), path)


def _is_classifier(config: PreTrainedConfig, path: str | Path) -> bool:
    if not any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
        return False
    if config.num_labels != 1:
        raise ValueError(
            f"{path} is a classifier with num_labels = {config.num_labels}, but a score is one number: "
            "choose a reward model with num_labels = 1, or a causal language model (it gets a new head)."
        )
    return True


def load_scalar_head(
    path: str | Path,
    *,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dropout: float | None = None,
    gradient_checkpointing: bool = False,
    deepspeed_config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load an AutoModelForSequenceClassification with num_labels = 1; wrap it in `TokenScores`.

    The head of a saved classifier is loaded; a causal LM gets a new head: normal with standard deviation 1/√(H+1),
    depending only on torch's seed. The log says which; `has_scalar_head` checks it in advance.

    Args:
        path, dtype, tokenizer, dropout, gradient_checkpointing, deepspeed_config, trust_remote_code: as for
            `load_causal_lm`; the tokenizer's pad id is set in the config, which transformers uses to find the last
            token.

    Raises:
        ValueError: no model or weights at the path, or a classifier with more than one output.
    """
    has_saved_head = has_scalar_head(path, trust_remote_code=trust_remote_code)
    options = LoadOptions(
        dtype=dtype,
        tokenizer=tokenizer,
        dropout=dropout,
        gradient_checkpointing=gradient_checkpointing,
        deepspeed_config=deepspeed_config,
        trust_remote_code=trust_remote_code,
    )
    model = load_pretrained(AutoModelForSequenceClassification, path, options, new_head=not has_saved_head)
    if tokenizer is not None:
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if has_saved_head:
        logger.info("%s: a saved classifier, its scalar head was loaded", path)
    else:
        init_scalar_head(model)
        logger.warning("%s has no scalar head: a new one was initialised, its scores are untrained", path)
    return model


def init_scalar_head(model: PreTrainedModel) -> None:
    """Initialise a new `score` head: normal weights with standard deviation 1/√(H+1), zero bias.

    The values depend only on torch's initial seed, so they are equal for every ZeRO stage and world size.

    Source: Stiennon et al. 2020, "Learning to summarize from human feedback", appendix B.1 (arXiv:2009.01325).
    """
    head = getattr(model, "score", None)
    if head is None:
        return  # encoders keep the initialisation of their own multi-layer heads
    generator = torch.Generator().manual_seed(torch.initial_seed())
    shape = full_shape(head.weight)
    values = torch.randn(shape, generator=generator) / (shape[1] + 1) ** 0.5
    with gathered(list(head.parameters()), modifier_rank=0), torch.no_grad():
        head.weight.copy_(values)
        if getattr(head, "bias", None) is not None:
            head.bias.zero_()


class TokenScores(nn.Module):
    """A scalar-head model whose forward returns a score per token; `.model` is the Hugging Face classifier."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.backbone = Backbone(model, model.base_model)

    @property
    def scores_tokens(self) -> bool:
        """True for decoders, whose head is applied per token; False for encoders with a pooled head."""
        return hasattr(self.model, "score") and self.model.base_model is not self.model

    @property
    def packing(self) -> Packing:
        """How the forward pass avoids padding; see dschat.models.backbone."""
        return self.backbone.packing

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, whole_sequence: bool = False,
        prompt_lengths: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Scores of all prefixes: column i scores the tokens up to and including i.

        Args:
            input_ids: [B, S] long, padded on either side.
            attention_mask: [B, S] bool, True on real tokens.
            prompt_lengths: [B] long, leading real tokens that rows with the same ones may share; None: none.
            whole_sequence: return `sequence_scores` instead, for callers that must use an engine's forward.

        Returns:
            [B, S] float32, undefined where attention_mask is False; [B] with whole_sequence.

        Raises:
            ValueError: the model has no per-token head.
        """
        if whole_sequence:
            return self.sequence_scores(input_ids, attention_mask, prompt_lengths)
        if not self.scores_tokens:
            raise ValueError(
                f"{type(self.model).__name__} scores whole sequences only, but a critic needs a score at every token: "
                "use it as reward model, and choose a decoder (OPT, Llama, Qwen2, GPT-2, …) for the critic."
            )
        hidden, source = self.backbone(input_ids, attention_mask, prompt_lengths=prompt_lengths)
        scores = self.model.score(hidden)[:, 0].float()  # [N]
        return scores[source].view_as(input_ids)  # [B, S]

    def sequence_scores(
        self, input_ids: Tensor, attention_mask: Tensor, prompt_lengths: Tensor | None = None
    ) -> Tensor:
        """Score of each whole sequence, at its last real token.

        Args:
            input_ids: [B, S] long, padded on either side.
            attention_mask: [B, S] bool, True on real tokens, at least one per row.
            prompt_lengths: as for `forward`.

        Returns:
            [B] float32.
        """
        if self.scores_tokens:
            scores = self(input_ids, attention_mask, prompt_lengths=prompt_lengths)
            return last_token_scores(scores, attention_mask)
        # Encoders count positions from column 0: move the real tokens to the left and pad on the right.
        order = attention_mask.long().argsort(dim=1, descending=True, stable=True)
        mask = attention_mask.gather(1, order)
        tokens = input_ids.gather(1, order).masked_fill(~mask, self.model.config.pad_token_id or 0)
        return self.model(input_ids=tokens, attention_mask=mask.long()).logits[:, 0].float()


def last_token_scores(scores: Tensor, attention_mask: Tensor) -> Tensor:
    """The score at each row's last real token.

    Args:
        scores: [B, S] float.
        attention_mask: [B, S] bool, True on real tokens, padded on either side.

    Returns:
        [B], the dtype of scores.

    Raises:
        ValueError: a row has no real token.
    """
    if not attention_mask.any(dim=1).all():
        raise ValueError("a row of attention_mask is all False, but an empty sequence has no score: drop such rows.")
    columns = torch.arange(scores.shape[1], device=scores.device)
    last = (columns * attention_mask).argmax(dim=1, keepdim=True)  # [B, 1]
    return scores.gather(1, last).squeeze(1)

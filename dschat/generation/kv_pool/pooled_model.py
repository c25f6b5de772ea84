"""A model's prefill and decoding forwards over a KV pool, validated by a trial run against the plain model."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat.generation.host_tensors import to_device
from dschat.generation.kv_pool.pool import ATTENTION_NAME, KVPool, LayerShape
from dschat.generation.rollout import left_pad
from dschat.generation.trial import TRIAL_TOKENS, accepts_argument, relative_error
from dschat.models.windows import short_windows
from dschat.tensors import position_ids

logger = logging.getLogger(__name__)


class PooledModel:
    """Runs a model's prefill and decoding forwards over a KV pool.

    Attributes:
        can_pack: short prompts can be prefilled packed, without padding; set by `mismatch`.
        gathers_contexts: each step gathers the rows' contexts from the pool for the model's own attention, where the
            pool's attention does not apply (ALiBi, latent or chunked attention, sliding masks); set by `mismatch`.
        capture_failure: why capturing a decoding step failed; it is not tried again.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.shapes: dict[int, LayerShape] = {}
        self.can_pack = self.gathers_contexts = False
        self.capture_failure: str | None = None
        arguments = ("position_ids", "logits_to_keep", "past_key_values")
        self._accepts = {name: accepts_argument(model, name) for name in arguments}

    @property
    def can_capture(self) -> bool:
        """Whether steps can be captured: gathered contexts change shape at every step."""
        return not self.gathers_contexts

    def prefill(self, pool: KVPool, prompts: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        """Prefill prompts, left-padded, storing keys and values from `starts` on; returns the last logits, [U, V].

        Everything that depends on lengths is computed on the host, which avoids device synchronisation.
        """
        device = self.model.get_input_embeddings().weight.device
        ids, mask = left_pad(prompts, pad_token_id=0, device=torch.device("cpu"))  # [U, P]
        positions = position_ids(mask)
        indices = (torch.tensor(starts).unsqueeze(1) + positions)[mask]  # [tokens]
        unpadded = bool(mask.all())
        columns = None if unpadded else to_device(mask.flatten().nonzero().squeeze(1), device)
        pool.begin_prefill(to_device(indices, device), columns)
        attention_mask = None if unpadded else to_device(mask.long(), device)
        return self._forward(to_device(ids, device), attention_mask, to_device(positions, device), pool)

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, pool: KVPool | None) -> Tensor:
        """The logits [R, V] after the last column."""
        inputs = {"position_ids": positions, "logits_to_keep": 1, "past_key_values": pool}
        accepted = {name: value for name, value in inputs.items() if self._accepts[name]}
        if pool is not None and "past_key_values" not in accepted:
            raise NotImplementedError("its forward accepts no key-value cache")
        use_cache = pool is not None
        out = self.model(input_ids=ids, attention_mask=mask, use_cache=use_cache, return_dict=True, **accepted)
        return out.logits[:, -1]

    def prefill_packed(self, pool: KVPool, prompts: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        """As `prefill`, with prompts packed into one row; each token attends like a row of a decoding step.

        Without padding this is cheaper for short prompts; for long ones blockwise attention is faster.
        """
        device = self.model.get_input_embeddings().weight.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        first = torch.tensor(starts, device=device).repeat_interleave(lengths)
        ends = lengths.cumsum(0)
        positions = torch.arange(len(ids), device=device) - (ends - lengths).repeat_interleave(lengths)
        spans = torch.stack([first, positions, first + positions, torch.ones_like(first)], dim=1)
        pool.begin_step(spans, longest=max(map(len, prompts)))
        with self._decoding_attention():
            return self.model(
                input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(0), past_key_values=pool, use_cache=True,
                logits_to_keep=ends - 1, return_dict=True,
            ).logits[0]  # fmt: skip

    @contextmanager
    def _decoding_attention(self) -> Iterator[None]:
        config = self.model.config
        original, config._attn_implementation = config._attn_implementation, ATTENTION_NAME
        try:
            yield
        finally:
            config._attn_implementation = original

    def decode(self, pool: KVPool, tokens: Tensor, spans: Tensor, *, longest: int) -> Tensor:
        """Run the newest token of each row, tokens [R]; returns the next logits, [R, V]."""
        positions = (spans[:, 1] + spans[:, 3] - 1).unsqueeze(1)
        if self.gathers_contexts:
            return self._forward(tokens.unsqueeze(1), pool.begin_gathered_step(spans).long(), positions, pool)
        pool.begin_step(spans, longest=longest)
        with self._decoding_attention():
            return self._forward(tokens.unsqueeze(1), None, positions, pool)

    @property
    def bytes_per_token(self) -> int:
        """KV bytes per token, all layers together; set by `mismatch`."""
        return sum(shape.bytes for shape in self.shapes.values())

    @torch.inference_mode()
    def mismatch(self) -> str | None:
        """Why this model cannot run over the pool, or None; compares logits of a few tokens with the plain forward.

        Support is tested rather than listed by architecture: any difference in attention changes the logits.
        """
        problems = []
        for self.gathers_contexts in (False, True):
            with short_windows(self.model) as has_windows:
                problem = self._trial_mismatch(has_windows)
            if problem is None:
                if self.gathers_contexts:
                    logger.info(
                        "%s: contexts are gathered from the pool for the model's own attention at every step, which "
                        "copies keys and values: %s", type(self.model).__name__, problems[0],
                    )  # fmt: skip
                return None
            problems.append(problem)
        self.gathers_contexts = False
        return problems[0]

    def _trial_mismatch(self, has_windows: bool) -> str | None:
        embeddings = self.model.get_input_embeddings()
        vocabulary, device = embeddings.num_embeddings, embeddings.weight.device
        ids = torch.arange(2 * TRIAL_TOKENS, device=device).view(2, -1) * 7919 % vocabulary
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[1, :3] = False
        positions = position_ids(mask)
        pool = KVPool(2 * TRIAL_TOKENS + 3)
        starts = torch.tensor([[1], [1 + TRIAL_TOKENS]], device=device)
        prompts = [row[is_token].tolist() for row, is_token in zip(ids[:, :-1], mask[:, :-1], strict=True)]
        try:
            expected = self._forward(ids, mask.long(), positions, None)
            self.prefill(pool, prompts, [1, 1 + TRIAL_TOKENS])
            lengths = mask[:, :-1].sum(1, keepdim=True)
            newest = torch.tensor([[2 * TRIAL_TOKENS + 1], [2 * TRIAL_TOKENS + 2]], device=device)
            spans = torch.cat([starts, lengths, newest, torch.ones_like(newest)], dim=1)
            logits = self.decode(pool, ids[:, -1], spans, longest=TRIAL_TOKENS)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # anything the model's own code raises when given this cache
            if unsupported := self._unsupported_layers():
                return f"it has layers of {unsupported}, whose state is not only keys and values"
            return f"its attention does not use transformers' AttentionInterface ({error})"
        self.shapes = pool.shapes
        tolerance = 1e-2 if expected.dtype == torch.float32 else 0.1
        error = relative_error(logits, expected)
        if not error < tolerance:
            return f"over the pool its logits have a relative error of {error:.2g}"
        on_cpu = device.type == "cpu"
        self.can_pack = on_cpu and not self.gathers_contexts and self._packing_matches(ids, mask, expected, tolerance)
        return self._window_mismatch(pool.windows, has_windows)

    def _packing_matches(self, ids: Tensor, mask: Tensor, expected: Tensor, tolerance: float) -> bool:
        """Whether packed prompts give the same logits, which holds if only attention mixes tokens."""
        prompts = [row[is_token].tolist() for row, is_token in zip(ids, mask, strict=True)]
        pool = KVPool(2 * TRIAL_TOKENS + 1)
        try:
            logits = self.prefill_packed(pool, prompts, [1, 1 + TRIAL_TOKENS])
        except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
            return False
        return relative_error(logits, expected) < tolerance

    def _window_mismatch(self, windows: dict[int, int | None], has_windows: bool) -> str | None:
        """Describes layers with state other than keys and values, or windows that the trial did not test; else None."""
        if unsupported := self._unsupported_layers():
            return f"it has layers of {unsupported}"
        if has_windows or self.gathers_contexts:
            return None
        kinds = getattr(self.model.config.get_text_config(), "layer_types", None) or []
        differ = [
            layer for layer, kind in enumerate(kinds) if (kind == "sliding_attention") != bool(windows.get(layer))
        ]
        return f"its layers {differ} do not pass the windows of its config to their attention" if differ else None

    def _unsupported_layers(self) -> str:
        """The layer types that the pool does not support, even if a few tokens give equal logits."""
        kinds = getattr(self.model.config.get_text_config(), "layer_types", None) or []
        supported = {"full_attention", "sliding_attention"}
        supported |= {"chunked_attention"} if self.gathers_contexts else set()
        return ", ".join(sorted(set(kinds) - supported))

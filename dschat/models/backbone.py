"""Hidden states of a padded batch: over its real tokens alone where the model allows it, else over a rectangle."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat.models.compiled_layers import CompiledLayers
from dschat.models.cpu import attention
from dschat.models.cpu.attention import AttentionKernels
from dschat.models.cpu.fused_modules import Forward, fused_forwards, replaced_forwards
from dschat.models.forward_context import Context, forward_context
from dschat.models.packed.attention import packed_attention
from dschat.models.packed.rows import pack_rows, shared_prompts
from dschat.tensors import position_ids


@dataclass(frozen=True)
class Packing:
    """How a batch is run.

    Attributes:
        remove_padding: as one row of its real tokens; otherwise padded to a rectangle.
        share_prompts: equal prompts of several rows once; needs remove_padding.
    """

    remove_padding: bool = False
    share_prompts: bool = False


class TokenNetwork(Protocol):
    """TokenLogprobs or TokenScores: a model, and how its forward pass runs."""

    model: PreTrainedModel
    backbone: Backbone


@contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[None]:
    """Without dropout inside; on exit the modes of the wrapper and of its model, which may differ, are restored."""
    modes = network.training, network.model.training
    network.eval()
    try:
        yield
    finally:
        network.train(modes[0])
        network.model.train(modes[1])


class Backbone:
    """Runs a model without its head. Not a module: the model's own modules hold the parameters.

    Args:
        model: whose config selects the attention.
        body: its submodule that maps ids to hidden states.

    Attributes:
        packing: rectangles, until dschat.models.packed.trial finds what the model supports.
        aligns_left: the rows of a rectangle start in its first column, so that it is as wide as the longest one.
        compiled: the model's layers compiled, after compile_layers.
        fused: modules that run by C++ kernels, and their forwards, after use_cpu_kernels.
    """

    def __init__(self, model: PreTrainedModel, body: nn.Module) -> None:
        # In a tuple, since a module as an attribute of a module would be registered twice.
        self._modules_of = (model, body)
        self.packing, self.aligns_left = Packing(), False
        self.compiled: CompiledLayers | None = None
        self.fused: dict[nn.Module, Forward] = {}
        self._attention_kernels: AttentionKernels | None = None
        self.accepts_position_ids = "position_ids" in inspect.signature(body.forward).parameters

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor, *, prompt_lengths: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Last hidden states of the real tokens, and where each column's are.

        Args:
            input_ids: [B, S] long, padded on either side.
            attention_mask: [B, S] bool, True on real tokens.
            prompt_lengths: [B] long, leading real tokens that rows may share if they are equal; 0: none.
            starts: [B, S] bool, True where a conversation starts, in rows that hold several.

        Returns:
            hidden: [N, H]; source: [B · S] long, the row of `hidden` of each column, undefined on padding.
        """
        if not self.packing.remove_padding:
            if starts is None and self.aligns_left:
                columns = torch.arange(attention_mask.shape[1], device=attention_mask.device)
                starts = columns == attention_mask.int().argmax(dim=1, keepdim=True)  # [B, S]
            return self._rectangle(input_ids, attention_mask, starts)
        prompts = []
        if self.packing.share_prompts and prompt_lengths is not None and starts is None and len(input_ids) > 1:
            prompts = shared_prompts(input_ids, attention_mask, prompt_lengths)
        rows = pack_rows(attention_mask, starts=starts, prompts=prompts)
        tokens = input_ids.flatten()[rows.tokens][None]  # [1, N]
        packed = partial(packed_attention, self._modules_of[0].config, rows.layout, kernels=self._attention_kernels)
        return self._run(tokens, torch.ones_like(tokens), rows.position_ids, packed)[0], rows.source

    def _rectangle(self, input_ids: Tensor, attention_mask: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
        """As __call__, over the padded rows; with `starts`, over one left-aligned row for each conversation."""
        source = torch.arange(input_ids.numel(), device=input_ids.device)
        if starts is not None:
            source.zero_()
            real = attention_mask.flatten().nonzero().squeeze(1)
            conversation = (starts & attention_mask).flatten()[real].cumsum(0) - 1  # [tokens]
            lengths = conversation.bincount()
            column = torch.arange(len(real), device=real.device) - (lengths.cumsum(0) - lengths)[conversation]
            width = int(lengths.max())
            source[real] = conversation * width + column
            rectangle = input_ids.new_zeros(len(lengths) * width)
            rectangle[source[real]] = input_ids.flatten()[real]
            input_ids = rectangle.view(-1, width)
            attention_mask = torch.arange(width, device=real.device) < lengths[:, None]
        positions = position_ids(attention_mask)
        return self._run(input_ids, attention_mask.long(), positions).flatten(0, 1), source

    def _run(self, input_ids: Tensor, attention_mask: Tensor, positions: Tensor, *contexts: Context) -> Tensor:
        """Last hidden states [B, S, H]; positions count real tokens only."""
        arguments = {"position_ids": positions} if self.accepts_position_ids else {}
        body = self._modules_of[1]
        fused = partial(replaced_forwards, self.fused)
        with forward_context(fused, *contexts), self.compiled.active() if self.compiled else nullcontext():
            outputs = body(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **arguments)
        return outputs.last_hidden_state

    def use_cpu_kernels(self, *, layers: bool = True) -> None:
        """Run packed attention by C++ kernels from now on, and norms, gates and rotary embeddings that they equal.

        On other devices, or without a C++ compiler, nothing changes. A collective under ZeRO-3.

        Args:
            layers: False: attention only.
        """
        if get_accelerator().device_name() == "cpu":
            self._attention_kernels = attention.load()
            self.fused = fused_forwards(self._modules_of[0]) if layers else {}

    def compile_layers(self, **options: Any) -> None:
        """Compile the layers from now on; see CompiledLayers."""
        model, body = self._modules_of
        self.compiled = CompiledLayers(body, name=type(model).__name__, **options)


def backbone_of(model: PreTrainedModel) -> nn.Module | None:
    """The submodule that maps ids to hidden states; None if it is not separate from the head."""
    if model.base_model is not model:
        return model.base_model
    # Llama 4: the backbone's attribute name differs from the class's base_model_prefix.
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    parts = [part for part in model.children() if embeddings in part.modules() and head not in part.modules()]
    return parts[0] if len(parts) == 1 and parts[0] is not embeddings else None

"""Decoder layers compiled by torch.compile while a Backbone runs them; everything else sees the plain modules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters
from transformers.modeling_layers import GradientCheckpointingLayer

from dschat.models.packed.attention import RUNS_UNCOMPILED

logger = logging.getLogger(__name__)

# Variants of one function: training and no_grad, precisions, adapters on and off, sliding and full attention, for each
# model of the run. torch's default of 8 would leave some of them uncompiled without a word.
_VARIANTS = 64
_SETTINGS = {
    "recompile_limit": _VARIANTS,
    "accumulated_recompile_limit": 8 * _VARIANTS,
    "fail_on_recompile_limit_hit": True,
}

Function = Callable[..., Any]


class CompiledLayers:
    """Runs the decoder layers of a model compiled, inside `with layers.active():`.

    Layers of one class share the compiled code. The number of tokens is dynamic, so that batches of other sizes do not
    compile again. The modules themselves are unchanged: parameter names, exports and rollouts do not see it. If the
    layers cannot be compiled, the log says why, and they run as they are.

    Args:
        body: the model's submodule that maps ids to hidden states. Its layers are the children of its ModuleLists.
        name: of the model, for the log.
        backend: of torch.compile.
    """

    def __init__(self, body: nn.Module, *, name: str, backend: str | Function = "inductor") -> None:
        self._body = (body,)  # in a tuple, since the owner may be a module, which would register it twice
        self._name, self._backend = name, backend
        self._compiled: dict[Function, Function] = {}
        self._is_checked = False
        self.is_on = True

    @contextmanager
    def active(self) -> Iterator[None]:
        """Compile the forward passes of the layers, also where gradient checkpointing recomputes them later."""
        if self.is_on and any(hasattr(parameter, "ds_id") for parameter in self._body[0].parameters()):
            self._turn_off("hooks of ZeRO-3 gather its parameters; use a lower stage")
        # A layer with a forward of its own has been patched: it keeps it.
        layers = [layer for layer in _layers(self._body[0]) if self.is_on and "forward" not in layer.__dict__]
        breaks = set(counters["graph_break"])
        for layer in layers:
            layer.__dict__["forward"] = partial(self._forward, layer)
        try:
            yield
        finally:
            for layer in layers:
                del layer.__dict__["forward"]
        if layers and not self._is_checked:
            self._is_checked = True
            self._check_breaks(set(counters["graph_break"]) - breaks)

    def _forward(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As the layer's forward; gradient checkpointing stays outside of the compiled code."""
        forward = type(layer).forward
        if not isinstance(layer, GradientCheckpointingLayer):
            return self._run(forward, layer, *args, **kwargs)
        run = partial(self._run, forward.__wrapped__, layer, **kwargs)  # without transformers' checkpoint around it
        if layer.gradient_checkpointing and layer.training:
            return layer._gradient_checkpointing_func(run, *args)
        return run(*args)

    def _run(self, forward: Function, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.get("hidden_states")
        # A single token would be compiled as a constant.
        if not self.is_on or not isinstance(hidden, Tensor) or hidden.dim() != 3 or hidden.shape[1] < 2:
            return forward(layer, *args, **kwargs)
        if forward not in self._compiled:
            # dynamic: sizes cross the graph break at packed attention as numbers, which marked tensors do not cover.
            self._compiled[forward] = torch.compile(forward, backend=self._backend, dynamic=True)
        try:
            with torch._dynamo.config.patch(_SETTINGS):
                return self._compiled[forward](layer, *args, **kwargs)
        except FailOnRecompileLimitHit:
            self._turn_off(f"its layers need more than {_SETTINGS['recompile_limit']} variants of compiled code")
        except TorchDynamoException as problem:  # no compiler, or code that it does not support
            self._turn_off(f"it cannot be compiled ({_first_line(problem)})")
        return forward(layer, *args, **kwargs)

    def _check_breaks(self, reasons: set[str]) -> None:
        """Layers whose graphs break elsewhere than at packed attention would be slower compiled."""
        foreign = [reason for reason in reasons if RUNS_UNCOMPILED not in reason]
        if foreign:
            self._turn_off(f"its layers cannot be traced as a whole ({_first_line(foreign[0])})")

    def _turn_off(self, reason: str) -> None:
        self.is_on = False
        logger.warning("--compile: %s runs uncompiled: %s", self._name, reason)


def _first_line(problem: object) -> str:
    return str(problem).strip().partition("\n")[0]


def _layers(module: nn.Module) -> list[nn.Module]:
    """The children of the outermost ModuleLists."""
    layers: list[nn.Module] = []
    for child in module.children():
        layers += list(child) if isinstance(child, nn.ModuleList) else _layers(child)
    return layers

"""Recognises layers with adapters. PEFT takes a second to import, and is needed only where there are adapters."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer
    from typing_extensions import TypeIs


def is_lora_layer(module: nn.Module) -> TypeIs[LoraLayer]:
    """Whether the module is a layer with adapters: False while nothing has imported PEFT's layers."""
    lora = sys.modules.get("peft.tuners.lora")
    return lora is not None and isinstance(module, lora.LoraLayer)

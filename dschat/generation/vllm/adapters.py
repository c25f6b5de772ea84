"""LoRA adapters inside vLLM, for --vllm_lora: the policy's base weights are loaded once, its adapters at every sync."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from torch import nn

from dschat.models.adapter_files import adapter_config, save_adapters

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM allocates adapters for


def engine_rank(dim: int) -> int | None:
    """The smallest rank of vLLM that holds adapters of rank `dim`; None if they are too large."""
    return next((rank for rank in RANKS if rank >= dim), None)


def lora_arguments(model: nn.Module) -> dict[str, object]:
    """Arguments of vllm.LLM for the model's adapters."""
    rank = engine_rank(adapter_config(model).r)
    return {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1, "max_cpu_loras": 1}


class EngineAdapters:
    """The policy's adapters in vLLM, under a new name at each load, as vLLM caches adapters and prefixes by name.

    Attributes:
        request: passed with every generation; None before the first load.
    """

    def __init__(self, llm: LLM, model: nn.Module) -> None:
        self._llm, self._model, self._loads = llm, model, 0
        self.request: LoRARequest | None = None

    def load(self) -> None:
        """Replace the engine's adapters by the policy's. A collective under ZeRO-3.

        Raises:
            RuntimeError: vLLM does not take them.
        """
        from vllm.lora.request import LoRARequest

        self._loads += 1
        if self.request is not None:
            self._llm.llm_engine.remove_lora(self.request.lora_int_id)
            self.request = None
        with tempfile.TemporaryDirectory() as folder:
            save_adapters(self._model, folder)
            request = LoRARequest(f"policy-{self._loads}", self._loads, folder)
            try:
                added = self._llm.llm_engine.add_lora(request)
            except Exception as error:
                raise RuntimeError(f"vLLM does not take the adapters: train without --vllm_lora ({error})") from error
        if not added:
            raise RuntimeError("vLLM does not take the adapters: train without --vllm_lora")
        self.request = request

"""Load the network of steps 1 and 2, which train one model, by the flags of their settings."""

from collections.abc import Callable
from typing import Any, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dschat.arguments import DeviceArguments, OneModelSettings
from dschat.distributed.deepspeed_config import DTYPES
from dschat.models.backbone import TokenNetwork
from dschat.models.liger_kernels import use_liger_kernels
from dschat.models.packed.trial import enable_packing

Network = TypeVar("Network", bound=TokenNetwork)


def load_network(
    deepspeed_config: dict[str, Any], *, load_model: Callable[..., PreTrainedModel],
    wrapper: Callable[[PreTrainedModel], Network], settings: OneModelSettings, tokenizer: PreTrainedTokenizerBase,
    path: str | None = None, frozen: bool = False,
) -> Network:  # fmt: skip
    """Load a model and wrap it; under ZeRO-3 its weights are partitioned while they are loaded.

    Args:
        load_model: load_causal_lm or load_scalar_head.
        wrapper: TokenLogprobs or TokenScores, whose forward pass is trained.
        path: folder or hub name; None: --model_name_or_path.
        frozen: no dropout and no gradient checkpointing, as for a reference model.
    """
    model, devices = settings.model, settings.devices
    network = load_model(
        path or model.model_name_or_path,
        dtype=DTYPES[devices.dtype],
        tokenizer=tokenizer,
        dropout=0.0 if frozen else model.dropout,
        gradient_checkpointing=devices.gradient_checkpointing and not frozen,
        deepspeed_config=deepspeed_config,
        trust_remote_code=model.trust_remote_code,
    )
    wrapped = wrapper(network)
    set_forward_options(wrapped, devices)
    return wrapped


def set_forward_options(network: TokenNetwork, devices: DeviceArguments) -> None:
    """Set how the network's forward pass runs: without padding, compiled, with other kernels.

    A collective under ZeRO-3. Call it before adapters are added and before the network is wrapped in an engine.
    """
    if devices.kernels == "auto":
        network.backbone.use_cpu_kernels(layers=not devices.compile)  # compiled code fuses them itself
    enable_packing(network, remove_padding=devices.remove_padding, share_prompts=devices.share_prompts)
    if devices.kernels == "liger":
        use_liger_kernels(network)
    if devices.compile:
        network.backbone.compile_layers()

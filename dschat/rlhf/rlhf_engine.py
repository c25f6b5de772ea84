"""The four models of RLHF on the same devices, each an engine of its own."""

from pathlib import Path
from typing import Any

import deepspeed
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from dschat import launch
from dschat.arguments import (
    DeviceArguments,
    LoraArguments,
    OptimizerArguments,
    PPOArguments,
    RLHFModelArguments,
    RolloutArguments,
)
from dschat.deepspeed_config import DTYPES, frozen_config
from dschat.engines import frozen_engine
from dschat.generation import Decoder, HybridEngine, TransformersDecoder
from dschat.models.causal_lm import TokenLogprobs, load_causal_lm
from dschat.models.lora import add_lora
from dschat.models.scalar_head import TokenScores, load_scalar_head
from dschat.models.weights import gathered
from dschat.set_up import build_trainable


class DeepSpeedRLHFEngine:
    """Builds and owns actor, ref, critic, reward, and the moving average of the actor.

    Attributes:
        actor: HybridEngine over the policy that is trained; `.actor.engine` is its DeepSpeedEngine (TokenLogprobs).
        ref: frozen DeepSpeedEngine (TokenLogprobs), the policy as it was before training.
        critic: DeepSpeedEngine (TokenScores), starts as the reward model unless told otherwise.
        reward: frozen DeepSpeedEngine (TokenScores).
        actor_ema: frozen float32 DeepSpeedEngine (TokenLogprobs), or None without --enable_ema.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        reward_tokenizer: PreTrainedTokenizerBase,
        *,
        models: RLHFModelArguments,
        ppo: PPOArguments,
        optimizer: OptimizerArguments,
        lora: LoraArguments,
        devices: DeviceArguments,
        rollouts: RolloutArguments,
        total_steps: int,
    ):
        self.tokenizer, self.reward_tokenizer = tokenizer, reward_tokenizer
        self.models, self.devices, self.lora = models, devices, lora
        self.micro_batch_size = ppo.per_device_training_batch_size
        reward_path = models.reward_model_name_or_path or models.critic_model_name_or_path
        critic_path = models.critic_model_name_or_path or models.reward_model_name_or_path
        shared: dict[str, Any] = {
            "micro_batch_size": self.micro_batch_size, "total_steps": total_steps,
            "optimizer": optimizer, "lora": lora, "devices": devices,
        }  # fmt: skip
        policy = build_trainable(
            lambda config: self._causal_lm(config, dropout=models.actor_dropout, trained=True),
            learning_rate=models.actor_learning_rate,
            weight_decay=models.actor_weight_decay,
            zero_stage=models.actor_zero_stage,
            lora_dim=models.actor_lora_dim,
            **shared,
        )
        self.critic = build_trainable(
            lambda config: self._scalar_head(
                critic_path, config, tokenizer, dropout=models.critic_dropout, trained=True
            ),
            learning_rate=models.critic_learning_rate,
            weight_decay=models.critic_weight_decay,
            zero_stage=models.critic_zero_stage,
            lora_dim=models.critic_lora_dim,
            **shared,
        )
        ref_config = self._frozen_config(models.actor_zero_stage, offload=models.offload_reference_model)
        self.ref = frozen_engine(self._causal_lm(ref_config, dropout=0.0), config=ref_config)
        reward_config = self._frozen_config(models.critic_zero_stage, offload=models.offload_reward_model)
        self.reward = frozen_engine(
            self._scalar_head(reward_path, reward_config, reward_tokenizer, dropout=0.0), config=reward_config
        )
        self.actor = HybridEngine(
            policy,
            decoder=Decoder if rollouts.uses_hybrid_engine else TransformersDecoder,
            slots=rollouts.generation_slots or None,
            memory_fraction=rollouts.generation_memory_fraction,
            pin_buffers=rollouts.pin_generation_buffers,
        )
        self.actor_ema = self._moving_average() if models.enable_ema else None

    @property
    def trained(self) -> dict[str, deepspeed.DeepSpeedEngine]:
        return {"actor": self.actor.engine, "critic": self.critic}

    @torch.no_grad()
    def update_ema(self, decay: float) -> None:
        """average ← decay · average + (1 − decay) · actor, parameter by parameter; a collective under ZeRO-3."""
        if self.actor_ema is None:
            return
        pairs = zip(self.actor.engine.module.parameters(), self.actor_ema.module.parameters(), strict=True)
        for parameter, average in pairs:
            # What ZeRO-3 gathers is kept only if it was written inside the context, on the modifier rank.
            with gathered([parameter]), gathered([average], modifier_rank=0):
                average.data.lerp_(parameter.data.to(average.dtype), 1 - decay)

    def save_ema(self, folder: Path) -> None:
        """Write the moving average, whole, into a checkpoint's folder; every rank calls it."""
        if self.actor_ema is None:
            return
        state = {}
        for name, parameter in self.actor_ema.module.named_parameters():
            with gathered([parameter]):
                if launch.is_main():
                    state[name] = parameter.detach().to("cpu", copy=True)
        if launch.is_main():
            save_file(state, folder / "actor_ema.safetensors")

    @torch.no_grad()
    def load_ema(self, folder: Path) -> None:
        if self.actor_ema is None:
            return
        state = load_file(folder / "actor_ema.safetensors")
        for name, parameter in self.actor_ema.module.named_parameters():
            with gathered([parameter], modifier_rank=0):
                parameter.data.copy_(state[name])

    def _causal_lm(
        self, config: dict[str, Any], *, dropout: float, trained: bool = False, dtype: torch.dtype | None = None
    ) -> TokenLogprobs:
        return TokenLogprobs(
            load_causal_lm(
                self.models.actor_model_name_or_path,
                dtype=dtype or DTYPES[self.devices.dtype],
                tokenizer=self.tokenizer,
                dropout=dropout,
                gradient_checkpointing=trained and self.devices.gradient_checkpointing,
                deepspeed_config=config,
            )
        )

    def _scalar_head(self, path: str, config: dict[str, Any], tokenizer: PreTrainedTokenizerBase, *, dropout: float,
                     trained: bool = False) -> TokenScores:  # fmt: skip
        return TokenScores(
            load_scalar_head(
                path,
                dtype=DTYPES[self.devices.dtype],
                tokenizer=tokenizer,
                dropout=dropout,
                gradient_checkpointing=trained and self.devices.gradient_checkpointing,
                deepspeed_config=config,
            )
        )

    def _frozen_config(self, zero_stage: int, *, offload: bool, dtype: str | None = None) -> dict[str, Any]:
        return frozen_config(
            dtype=dtype or self.devices.dtype,
            zero_stage=zero_stage,
            micro_batch_size=self.micro_batch_size,
            world_size=launch.world_size(),
            offload=offload,
        )

    def _moving_average(self) -> deepspeed.DeepSpeedEngine:
        # float32: in bf16 a step of 1 − decay is lost to rounding.
        config = self._frozen_config(self.models.actor_zero_stage, offload=False, dtype="fp32")
        network = self._causal_lm(config, dropout=0.0, dtype=torch.float32)
        if self.models.actor_lora_dim:
            add_lora(
                network.model,
                dim=self.models.actor_lora_dim,
                module_name=self.lora.lora_module_name,
                only_optimize_lora=self.lora.only_optimize_lora,
            )
        self.actor_ema = frozen_engine(network, config=config)
        self.update_ema(0.0)
        return self.actor_ema

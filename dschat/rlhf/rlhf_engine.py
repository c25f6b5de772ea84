"""DeepSpeed engines of the RLHF models, all on the same devices; only those that the algorithm needs are built."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from dschat.arguments import RLHFSettings
from dschat.arguments.command_line import as_settings_errors
from dschat.data.micro_batches import MicroBatchLimit, limit_of
from dschat.distributed import collectives, failpoint, groups, watchdog
from dschat.distributed.deepspeed_config import DTYPES, frozen_config
from dschat.distributed.engines import frozen_engine
from dschat.distributed.state_offload import StateOffload
from dschat.generation import ROLLOUT_ENGINES, EngineSettings, RolloutEngine
from dschat.models.causal_lm import TokenLogprobs, load_causal_lm, load_tokenizer
from dschat.models.lora import add_lora, without_adapters
from dschat.models.scalar_head import TokenScores, load_scalar_head
from dschat.models.weights import gathered
from dschat.rewards.weighted_sum import RewardModel
from dschat.runs.network_loading import set_forward_options
from dschat.runs.trainable import ModelHyperparameters, build_trainable


class DeepSpeedRLHFEngine:
    """Builds and owns actor, ref, critic, reward models, and the actor's exponential moving average (EMA).

    Attributes:
        policy: the trained DeepSpeedEngine (TokenLogprobs).
        actor: rollout engine over the policy.
        ref: frozen DeepSpeedEngine (TokenLogprobs), the policy before training; None where no KL penalty is used, and
            where only adapters are trained: then it is the policy with its adapters off (see `reference`).
        critic: DeepSpeedEngine (TokenScores), or None for critic-free algorithms.
        reward_models: path → RewardModel over a frozen DeepSpeedEngine (TokenScores).
        actor_ema: frozen float32 DeepSpeedEngine (TokenLogprobs), or None without --enable_ema.
        state_offload: of what rollouts do not need, or None without --offload_states_during_rollout.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, settings: RLHFSettings, total_steps: int,
        reward_paths: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Build the models that the settings need.

        Args:
            tokenizer: the actor's.
            total_steps: optimizer steps of the run, for the learning-rate schedules.
            reward_paths: folders or hub names of the reward models.
        """
        ppo, self.tokenizer, self.models = settings.ppo, tokenizer, settings.models
        self.optimizer, self.devices, self.lora = settings.optimizer, settings.devices, settings.lora
        self.micro_batch_size = ppo.per_device_training_batch_size
        self.policy = self._policy(total_steps=max(1, total_steps - ppo.actor_freeze_steps))
        self.critic = self._critic(total_steps=total_steps) if ppo.trains_critic else None
        self.ref_is_refreshed = ppo.needs_reference and ppo.ref_refresh_interval > 0
        # With adapters alone trained, the policy without them is the reference.
        only_adapters = bool(self.models.actor_lora_dim) and self.lora.only_optimize_lora
        self.ref_is_policy = ppo.needs_reference and only_adapters and not self.ref_is_refreshed
        has_own_reference = ppo.needs_reference and not self.ref_is_policy
        self.ref = self._reference(refreshed=self.ref_is_refreshed) if has_own_reference else None
        self.reward_models = {path: self._reward_model(path) for path in reward_paths}
        self.actor = ROLLOUT_ENGINES[settings.rollouts.engine](
            self.policy, EngineSettings(rollouts=settings.rollouts, vllm=settings.vllm, seed=settings.run.seed)
        )
        self.actor_ema = self._moving_average() if self.models.enable_ema else None
        self.state_offload = self._state_offload() if settings.rollouts.offload_states_during_rollout else None

    def limit_of(self, engine: deepspeed.DeepSpeedEngine) -> MicroBatchLimit:
        """Tokens per forward pass of one of the models."""
        return limit_of(engine.module, rows=self.micro_batch_size, max_tokens=self.devices.max_tokens_per_micro_batch)

    @contextmanager
    def generation(self) -> Iterator[RolloutEngine]:
        """The actor's generation(), with the states that it does not need in host memory if that was asked for."""
        with self.state_offload.offloaded() if self.state_offload else nullcontext(), self.actor.generation():
            yield self.actor

    @property
    def reward(self) -> deepspeed.DeepSpeedEngine | None:
        """The engine of the first reward model, or None."""
        return next((model.engine for model in self.reward_models.values()), None)

    @property
    def trained(self) -> dict[str, deepspeed.DeepSpeedEngine]:
        return {"actor": self.policy} | ({"critic": self.critic} if self.critic is not None else {})

    @property
    def shadow_models(self) -> dict[str, deepspeed.DeepSpeedEngine]:
        """Frozen models updated from the actor (EMA, refreshed reference); they are checkpointed too."""
        ema = {"actor_ema": self.actor_ema} if self.actor_ema is not None else {}
        return ema | ({"ref": self.ref} if self.ref_is_refreshed else {})

    @contextmanager
    def reference(self) -> Iterator[deepspeed.DeepSpeedEngine | None]:
        """The engine that computes reference log-probs inside the context, in evaluation mode; None without one."""
        if not self.ref_is_policy:
            yield self.ref
            return
        self.policy.eval()
        with without_adapters(self.policy.module):
            yield self.policy

    def update_ema(self, decay: float) -> None:
        """EMA ← decay · EMA + (1 − decay) · actor, for each parameter; a collective under ZeRO-3."""
        if self.actor_ema is not None:
            self._sync_from_actor(self.actor_ema, decay)

    def refresh_reference(self) -> None:
        """Copy the actor's current weights into the reference model; a collective under ZeRO-3."""
        self._sync_from_actor(self.ref, 0.0)

    @torch.no_grad()
    def _sync_from_actor(self, shadow: deepspeed.DeepSpeedEngine, decay: float) -> None:
        pairs = zip(self.policy.module.parameters(), shadow.module.parameters(), strict=True)
        for parameter, shadow_parameter in pairs:
            # GatheredParameters writes back only what the modifier rank changed inside the context.
            with gathered([parameter]), gathered([shadow_parameter], modifier_rank=0):
                shadow_parameter.data.lerp_(parameter.data.to(shadow_parameter.dtype), 1 - decay)

    def save_shadow_models(self, folder: Path) -> None:
        """Write the full weights of every shadow model into a checkpoint's folder. A collective.

        Raises:
            OSError: the main rank could not write one. Raised after all gathers, as an early exit would block the
                other ranks.
        """
        problems = []
        for kind, engine in self.shadow_models.items():
            state = {}
            for name, parameter in engine.module.named_parameters():
                with gathered([parameter]):
                    watchdog.progress()
                    if collectives.is_main():
                        state[name] = parameter.detach().to("cpu", copy=True)
            if collectives.is_main() and not problems:
                try:
                    failpoint.reached("save_shadow_model")
                    save_file(state, folder / f"{kind}.safetensors")
                except (OSError, RuntimeError, SafetensorError) as error:
                    problems.append(f"{kind}.safetensors: {error}")
        if problems:
            raise OSError(problems[0])

    @torch.no_grad()
    def load_shadow_models(self, folder: Path) -> None:
        for kind, engine in self.shadow_models.items():
            state = load_file(folder / f"{kind}.safetensors")
            for name, parameter in engine.module.named_parameters():
                with gathered([parameter], modifier_rank=0):
                    parameter.data.copy_(state[name])

    def _state_offload(self) -> StateOffload:
        frozen = [model.engine for model in self.reward_models.values()]
        frozen += [engine for engine in (self.ref, self.actor_ema) if engine is not None]
        trained = [] if self.critic is None else [self.critic]
        return StateOffload(self.policy, trained=trained, frozen=frozen)

    def _policy(self, *, total_steps: int) -> deepspeed.DeepSpeedEngine:
        models = self.models
        return build_trainable(
            lambda config: self._causal_lm(config, dropout=models.actor_dropout, trained=True),
            ModelHyperparameters(
                learning_rate=models.actor_learning_rate, weight_decay=models.actor_weight_decay,
                zero_stage=models.actor_zero_stage, lora_dim=models.actor_lora_dim,
            ),
            total_steps=total_steps,
            micro_batch_size=self.micro_batch_size, optimizer=self.optimizer, lora=self.lora, devices=self.devices,
        )  # fmt: skip

    def _critic(self, *, total_steps: int) -> deepspeed.DeepSpeedEngine:
        models = self.models
        return build_trainable(
            lambda config: self._scalar_head(
                models.critic_path, config, self.tokenizer, dropout=models.critic_dropout, trained=True
            ),
            ModelHyperparameters(
                learning_rate=models.critic_learning_rate, weight_decay=models.critic_weight_decay,
                zero_stage=models.critic_zero_stage, lora_dim=models.critic_lora_dim,
            ),
            total_steps=total_steps,
            micro_batch_size=self.micro_batch_size, optimizer=self.optimizer, lora=self.lora, devices=self.devices,
        )  # fmt: skip

    def _causal_lm(
        self, config: dict[str, Any], *, dropout: float, trained: bool = False, dtype: torch.dtype | None = None
    ) -> TokenLogprobs:
        with as_settings_errors():
            model = load_causal_lm(
                self.models.actor_model_name_or_path,
                dtype=dtype or DTYPES[self.devices.dtype],
                tokenizer=self.tokenizer,
                dropout=dropout,
                gradient_checkpointing=trained and self.devices.gradient_checkpointing,
                deepspeed_config=config,
                trust_remote_code=self.models.trust_remote_code,
            )
        network = TokenLogprobs(model)
        set_forward_options(network, self.devices)
        return network

    def _scalar_head(self, path: str, config: dict[str, Any], tokenizer: PreTrainedTokenizerBase, *, dropout: float,
                     trained: bool = False) -> TokenScores:  # fmt: skip
        with as_settings_errors():
            model = load_scalar_head(
                path,
                dtype=DTYPES[self.devices.dtype],
                tokenizer=tokenizer,
                dropout=dropout,
                gradient_checkpointing=trained and self.devices.gradient_checkpointing,
                deepspeed_config=config,
                trust_remote_code=self.models.trust_remote_code,
            )
        network = TokenScores(model)
        set_forward_options(network, self.devices)
        return network

    def _frozen_config(self, zero_stage: int, *, offload: bool, dtype: str | None = None) -> dict[str, Any]:
        return frozen_config(
            dtype=dtype or self.devices.dtype,
            zero_stage=zero_stage,
            micro_batch_size=self.micro_batch_size,
            world_size=groups.data_parallel_size(),
            offload=offload,
        )

    def _reference(self, *, refreshed: bool) -> deepspeed.DeepSpeedEngine:
        config = self._frozen_config(self.models.actor_zero_stage, offload=self.models.offload_reference_model)
        network = self._causal_lm(config, dropout=0.0)
        return frozen_engine(self._with_adapters(network) if refreshed else network, config=config)

    def _reward_model(self, path: str) -> RewardModel:
        config = self._frozen_config(self.models.critic_zero_stage, offload=self.models.offload_reward_model)
        tokenizer = load_tokenizer(path, trust_remote_code=self.models.trust_remote_code)
        engine = frozen_engine(self._scalar_head(path, config, tokenizer, dropout=0.0), config=config)
        return RewardModel(engine, tokenizer=tokenizer, actor_tokenizer=self.tokenizer, limit=self.limit_of(engine))

    def _moving_average(self) -> deepspeed.DeepSpeedEngine:
        # float32: in bf16 an update of size 1 − decay is rounded away.
        config = self._frozen_config(self.models.actor_zero_stage, offload=False, dtype="fp32")
        network = self._with_adapters(self._causal_lm(config, dropout=0.0, dtype=torch.float32))
        average = frozen_engine(network, config=config)
        self._sync_from_actor(average, 0.0)
        return average

    def _with_adapters(self, network: TokenLogprobs) -> TokenLogprobs:
        """Add the actor's LoRA adapters to the network, so that its parameters match the actor's one to one."""
        if self.models.actor_lora_dim:
            add_lora(network.model, dim=self.models.actor_lora_dim, **self.lora.options)
        return network

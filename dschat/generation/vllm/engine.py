"""VLLMEngine: rollouts by vLLM inside the training processes, with the weights that are being trained."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn

from dschat.arguments.vllm import VLLMArguments
from dschat.distributed import collectives, watchdog
from dschat.generation.memory import free_memory
from dschat.generation.request import Request
from dschat.generation.rollout import Rollout
from dschat.generation.rollout_engine import Capabilities
from dschat.generation.sampling import SamplingParams
from dschat.generation.vllm.adapters import EngineAdapters
from dschat.generation.vllm.construction import build_llm, unchanged_process
from dschat.generation.vllm.requests import (
    Response,
    Sample,
    limit_vocabulary,
    response_of,
    rollout_of,
    samples_of,
    sampling_params,
)
from dschat.generation.vllm.requirements import GIB
from dschat.generation.vllm.weight_check import (
    Checksum,
    checksum,
    differing_weights,
    engine_weights,
    repack_weights,
)
from dschat.models.weights import checkpoint_weights, pretrained_model


class VLLMEngine:
    """An engine in each training process, or one shared by each group of `vllm_tensor_parallel_size` ranks.

    On entry of `generation()` the plain weights (LoRA folded in) stream into the engine module by module, unless
    the policy is the same as at the last entry; there is no second whole copy besides the engine's own. On a GPU the
    engine sleeps outside the context.

    A sample's random numbers depend on seed, iteration and sample id alone; its tokens can differ with the batch it is
    decoded in, as vLLM's kernels round differently for other batches.

    Attributes:
        capabilities: see Capabilities.
        syncs: number of times that weights were loaded.
        held_bytes: of the device that the engine still held at its first sleep; 0 where it does not sleep.
    """

    def __init__(
        self, engine: nn.Module, options: VLLMArguments, *, max_tokens: int, seed: int, check_every: int = 0
    ) -> None:
        """Start vLLM. A collective.

        Args:
            engine: a DeepSpeedEngine around TokenLogprobs, a TokenLogprobs, or the Hugging Face model.
            max_tokens: of the longest prompt and response.
            check_every: compare the engine's weights with the policy's at every N-th sync; 0: at the first two only.

        Raises:
            RuntimeError: vLLM could not start.
        """
        self.policy, self.options, self.syncs, self.check_every = engine, options, 0, check_every
        self.capabilities = Capabilities(
            streams=False, reproducible=False, separate_weights=True, same_weights=not options.vllm_quantization
        )
        self._model = pretrained_model(engine)
        self._group = tensor_parallel_group(options.vllm_tensor_parallel_size)
        device = next(self._model.parameters()).device
        free = free_memory(device)
        self._llm = build_llm(self._model, options, max_tokens=max_tokens, seed=seed)
        self._adapters = EngineAdapters(self._llm, self._model) if options.vllm_lora else None
        self._loaded: WeightVersion | None = None  # of the weights in the engine
        self._loaded_adapters: WeightVersion | None = None
        self._vocabulary = self._model.config.get_text_config().vocab_size  # ids that can be sampled
        self._generating = False
        self._sleep()
        self.held_bytes = max(0, free - free_memory(device)) if self._sleeps else 0
        if self._sleeps and collectives.is_main():
            print(f"vLLM holds {self.held_bytes / GIB:.2f} GiB of the device while it sleeps", flush=True)

    @contextmanager
    def generation(self) -> Iterator[VLLMEngine]:
        """Load the policy's weights for the context. A collective; an exception inside puts the engine to sleep too.

        Raises:
            RuntimeError: entered twice, or the engine's weights are not the policy's.
        """
        if self._generating:
            raise RuntimeError("generation() is already entered: exit the outer context first.")
        self._generating = True
        try:
            self._load_weights()
            yield self
        finally:
            self._sleep()
            self._generating = False

    def generate(self, prompts: Sequence[Sequence[int]], **request: Any) -> Rollout:
        """Generate one response per prompt, inside generation(). Keyword arguments are the fields of Request.

        A collective of the ranks that share an engine.

        Raises:
            RuntimeError: called outside generation(), or a request failed.
            ValueError: see Request.check and SamplingParams.
        """
        if not self._generating:
            raise RuntimeError("generate() needs the loaded weights: with engine.generation(): engine.generate(...).")
        checked = Request(prompts=prompts, **request)
        checked.check(self._model.config)
        own = samples_of(checked)
        by_rank = collectives.all_gather_objects(own, group=self._group) if self._group else [own]
        responses = self._responses([sample for samples in by_rank for sample in samples], checked)
        first = sum(map(len, by_rank[: dist.get_rank(self._group)])) if self._group else 0
        return rollout_of(checked, responses[first : first + len(own)], next(self._model.parameters()).device)

    def _responses(self, samples: Sequence[Sample], request: Request) -> list[Response]:
        """The same on all ranks of the group, which run the same scheduler."""
        self._limit_vocabulary(request.sampling)
        with unchanged_process():
            outputs = self._llm.generate(
                [{"prompt_token_ids": sample.prompt} for sample in samples], sampling_params(samples, request),
                use_tqdm=False, lora_request=self._adapters.request if self._adapters else None,
            )  # fmt: skip
        watchdog.progress()
        return [response_of(output) for output in outputs]

    def _limit_vocabulary(self, sampling: SamplingParams) -> None:
        rows = self._model.config.get_text_config().vocab_size
        size = min(rows, sampling.vocabulary_size or rows)
        if size != self._vocabulary:
            self._llm.apply_model(functools.partial(limit_vocabulary, size=size))
            self._vocabulary = size

    def _load_weights(self) -> None:
        adapters = WeightVersion.of_adapters(self.policy) if self._adapters else None
        version = WeightVersion.of_base(self.policy) if self._adapters else WeightVersion.of(self.policy)
        current = version == self._loaded, adapters == self._loaded_adapters
        weights_are_current, adapters_are_current = map(all, zip(*collectives.all_gather_objects(current), strict=True))
        self._wake_up("weights")
        if not weights_are_current:
            self._stream_weights()
            self._loaded, adapters_are_current = version, adapters is None  # vLLM drops the adapters of other weights
        if not adapters_are_current:
            self._loaded_adapters = None  # until they are in
            self._adapters.load()
            self._loaded_adapters = adapters
        self.syncs += not (weights_are_current and adapters_are_current)
        self._wake_up("kv_cache")

    def _stream_weights(self) -> None:
        self._loaded = None  # until all of them are in
        weights = StreamedWeights(
            self._model, fold_adapters=self._adapters is None, with_checksums=self._check_is_due()
        )
        # Takes an iterator, as the worker runs in this process.
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        weights.require_complete()
        self._llm.apply_model(repack_weights)
        self._llm.reset_prefix_cache()  # of keys and values by the weights before
        if weights.checksums:
            self._check_weights(weights.checksums)

    def _check_is_due(self) -> bool:
        """At the first two syncs (the second one replaces weights) and every `check_every`-th."""
        # Quantised weights are others, and with tensor parallelism a rank has parts of them.
        comparable = not self.options.vllm_quantization and self.options.vllm_tensor_parallel_size == 1
        return comparable and (self.syncs < 2 or bool(self.check_every) and (self.syncs + 1) % self.check_every == 0)

    def _check_weights(self, checksums: dict[str, Checksum]) -> None:
        engine = self._llm.apply_model(engine_weights)[0]
        differing = differing_weights(
            checksums, engine, tied=self._model.all_tied_weights_keys, dtype=self._model.dtype
        )
        if differing:
            raise RuntimeError(
                f"vLLM has other weights than the policy: {len(differing)} of {len(engine.checksums)} differ after "
                f"they were loaded, {', '.join(differing[:4])} among them (stale weights). Its rollouts cannot be "
                "trained on: use --rollout_engine hybrid, and report this with the model's name"
            )

    @property
    def _sleeps(self) -> bool:
        return self.options.vllm_sleep_level > 0 and next(self._model.parameters()).device.type != "cpu"

    def _wake_up(self, tag: str) -> None:
        if self._sleeps:
            self._llm.wake_up(tags=[tag])

    def _sleep(self) -> None:
        if self._sleeps:
            self._llm.reset_prefix_cache()  # its keys and values are released
            self._llm.sleep(level=self.options.vllm_sleep_level)
            if self.options.vllm_sleep_level == 2:
                self._loaded = None  # the weights are gone


@dataclass(frozen=True)
class WeightVersion:
    """Identifies a policy's weights on this rank.

    Attributes:
        steps: optimizer steps, 0 without a DeepSpeedEngine.
        sample: bytes of the first and the last element of each parameter or partition: checkpoints can be loaded, and
            tests change weights, without a step.
    """

    steps: int
    sample: bytes

    @classmethod
    def of(cls, policy: nn.Module) -> WeightVersion:
        """Of all weights."""
        return cls._of_parameters(policy, [parameter for _, parameter in policy.named_parameters()], trained=True)

    @classmethod
    def of_base(cls, policy: nn.Module) -> WeightVersion:
        """Of the weights that are frozen where only adapters are trained."""
        base = [parameter for name, parameter in policy.named_parameters() if "lora_" not in name]
        return cls._of_parameters(policy, base, trained=False)

    @classmethod
    def of_adapters(cls, policy: nn.Module) -> WeightVersion:
        adapters = [parameter for name, parameter in policy.named_parameters() if "lora_" in name]
        return cls._of_parameters(policy, adapters, trained=True)

    @classmethod
    def _of_parameters(cls, policy: nn.Module, parameters: Sequence[Tensor], *, trained: bool) -> WeightVersion:
        local = (getattr(parameter, "ds_tensor", parameter).detach().flatten() for parameter in parameters)
        ends = [torch.stack([tensor[0], tensor[-1]]).double() for tensor in local if len(tensor)]
        sample = torch.cat(ends).cpu().numpy().tobytes()
        return cls(policy.global_steps if trained and isinstance(policy, DeepSpeedEngine) else 0, sample)


class StreamedWeights:
    """The policy's plain weights, one after the other.

    Attributes:
        taken, complete: number of weights that were taken, and whether that is all of them.
        checksums: of each weight taken, if wanted.
    """

    def __init__(self, model: nn.Module, *, fold_adapters: bool, with_checksums: bool) -> None:
        self.model, self.fold_adapters, self.taken, self.complete = model, fold_adapters, 0, False
        self.with_checksums = with_checksums
        self.checksums: dict[str, Checksum] = {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in checkpoint_weights(self.model, fold_adapters=self.fold_adapters):
            if self.with_checksums:
                self.checksums[name] = checksum(weight.detach())
            yield name, weight.detach()
            self.taken += 1
            watchdog.progress()
        self.complete = True

    def require_complete(self) -> None:
        """Raise a RuntimeError if the engine stopped taking weights before the last one."""
        if not self.complete:
            raise RuntimeError(
                f"vLLM took only {self.taken} of the policy's weights, so its rollouts would come from others: use "
                "--rollout_engine hybrid for this model"
            )


def tensor_parallel_group(size: int) -> dist.ProcessGroup | None:
    """The group of ranks that share this rank's engine: `size` consecutive ones. A collective; None for size 1."""
    if size == 1:
        return None
    own = None
    for first in range(0, dist.get_world_size(), size):
        ranks = range(first, first + size)
        group = dist.new_group(list(ranks))
        own = group if dist.get_rank() in ranks else own
    return own

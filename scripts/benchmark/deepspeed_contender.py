"""Decoding with DeepSpeed's rollout engine."""

from __future__ import annotations

import contextlib
import copy
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from contender import Ready, Setting, one_line, timed
from shapes import Case
from transformers_contenders import cut_to_lengths, left_padded


@contextmanager
def deepspeed_rollout(setting: Setting, case: Case, *, graphs: bool = False) -> Iterator[Ready]:
    """DeepSpeed's HybridEngineRollout: around its hybrid engine where that can be built, else around a plain engine.

    Single rows can end only by EOS, so it decodes all rows to the longest limit; with CUDA graphs it is greedy only.
    """
    from deepspeed.runtime.rollout.base import RolloutRequest, SamplingConfig
    from deepspeed.runtime.rollout.hybrid_engine_rollout import HybridEngineRollout, HybridEngineRolloutConfig

    if graphs and setting.device.type != "cuda":
        raise RuntimeError("its graph capture needs CUDA")
    with contextlib.redirect_stdout(sys.stderr):  # standard output is reserved for the table
        engine, note = inference_engine(setting, case)
    ids, mask = left_padded(case.prompts[:: case.prompt_kind.samples], setting.device)
    samples = case.prompt_kind.samples
    rollout_engine = HybridEngineRollout(
        engine, SimpleNamespace(pad_token_id=0, eos_token_id=None), HybridEngineRolloutConfig(use_graph_capture=graphs)
    )
    sampling = SamplingConfig(
        max_new_tokens=max(case.limits), temperature=0.0 if graphs else 1.0, n_samples_per_prompt=samples
    )

    def rollout() -> int:
        result = rollout_engine.generate(RolloutRequest(ids, mask), sampling)
        return sum(map(len, cut_to_lengths(result.input_ids[: case.batch, ids.shape[1] :], case.limits)))

    try:
        yield Ready(timed(setting, rollout), "; ".join(filter(None, ["greedy" if graphs else "", note])))
    finally:
        engine.destroy()


def inference_engine(setting: Setting, case: Case) -> tuple[torch.nn.Module, str]:
    """An engine in eval mode, and a note about it for the table."""
    os.environ.setdefault("DS_ACCELERATOR", setting.device.type)  # DeepSpeed's own choice ignores --device
    import deepspeed

    if not torch.distributed.is_initialized():
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = str(listener.getsockname()[1])
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        deepspeed.init_distributed("nccl" if setting.device.type == "cuda" else "gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": setting.model.dtype == torch.bfloat16},
        "fp16": {"enabled": setting.model.dtype == torch.float16},
    }
    reason = "its kernels need CUDA"
    if setting.device.type == "cuda":
        try:
            hybrid = {"enabled": True, "max_out_tokens": case.columns}
            # It injects its kernels into the module, so it gets its own copy.
            engine, *_ = deepspeed.initialize(
                model=copy.deepcopy(setting.model), config=config | {"hybrid_engine": hybrid}
            )
            engine.eval()  # returns None
            return engine, ""
        except Exception as error:  # any failure becomes the note of the plain engine
            reason = one_line(error)
    engine, *_ = deepspeed.initialize(model=setting.model, config=config)
    engine.eval()
    return engine, f"plain engine: {reason}"

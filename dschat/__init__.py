"""Post-training of language models: supervised fine-tuning, reward models, RLHF."""

import logging
import os

from dschat.lazy_imports import lazy_exports

__version__ = "0.1.0"

# OpenMP reads this when torch loads it, so it has to be set here, before any module imports torch: threads that
# spin long while they wait make ranks that share cores up to ten times slower, threads that sleep at once are slow to
# wake. About 20 µs of spinning costs nothing measurable with twice as many threads as cores.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _is_worth_printing(record: logging.LogRecord) -> bool:
    """DeepSpeed warns when it is imported: on every rank, and that it uses the CPU, which the programs print too."""
    is_main = os.environ.get("RANK", "0") == "0"
    return record.levelno >= logging.ERROR or (is_main and "Setting accelerator to CPU" not in record.getMessage())


logging.getLogger("DeepSpeed").addFilter(_is_worth_printing)

# The public interface: `from dschat import gae`. A name's module is imported when the name is first read.
_MODULES = {
    **dict.fromkeys(("linear_logprobs", "logprobs_of", "whiten"), "tensors"),
    **dict.fromkeys(("gae", "kl_estimate", "reinforce", "token_rewards"), "rlhf.advantages"),
    **dict.fromkeys(("dr_grpo", "grpo", "opo", "rloo"), "rlhf.group_advantages"),
    **dict.fromkeys(("ALGORITHMS", "Algorithm"), "rlhf.algorithms"),
    **dict.fromkeys((
        "POLICY_LOSSES", "cispo_loss", "dpo_loss", "gspo_loss", "hinge_loss", "ipo_loss", "kto_loss", "orpo_loss",
        "pairwise_loss", "policy_loss", "robust_loss", "sapo_loss", "sft_loss", "simpo_loss", "value_loss",
    ), "losses"),
    **dict.fromkeys(("Experience", "MiniDataset"), "rlhf.experience"),
    "DeepSpeedPPOTrainer": "rlhf.ppo_trainer",
    "DeepSpeedRLHFEngine": "rlhf.rlhf_engine",
    **dict.fromkeys(("HybridEngine", "Rollout", "RolloutEngine", "SamplingParams"), "generation"),
    **dict.fromkeys(("load_causal_lm", "load_tokenizer"), "models.causal_lm"),
    "load_scalar_head": "models.scalar_head",
    "export_model": "models.weights",
}  # fmt: skip
__all__ = list(_MODULES)
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)

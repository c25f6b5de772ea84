"""Losses as pure functions of tensors, each → (loss, metrics); one file per kind of training."""

from dschat.lazy_imports import lazy_exports

_MODULES = {
    "POLICY_LOSSES": "policy_table",
    "cispo_loss": "policy",
    "dpo_loss": "preference",
    "entropy_bonus": "regularization",
    "explained_variance": "value",
    "gspo_loss": "policy",
    "hinge_loss": "preference",
    "ipo_loss": "preference",
    "kl_loss": "regularization",
    "kto_kl": "kto",
    "kto_loss": "kto",
    "orpo_loss": "preference",
    "pairwise_loss": "reward_model",
    "policy_loss": "policy",
    "robust_loss": "preference",
    "sapo_loss": "policy",
    "sft_loss": "sft",
    "simpo_loss": "preference",
    "value_loss": "value",
}
__all__ = list(_MODULES)
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)

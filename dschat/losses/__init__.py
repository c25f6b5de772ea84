"""Losses as pure functions of tensors, each → (loss, metrics); one file per kind of training."""

from dschat.losses.kto import kto_kl, kto_loss
from dschat.losses.policy import POLICY_LOSSES, cispo_loss, gspo_loss, policy_loss, sapo_loss
from dschat.losses.preference import dpo_loss, hinge_loss, ipo_loss, orpo_loss, robust_loss, simpo_loss
from dschat.losses.regularization import entropy_bonus, kl_loss
from dschat.losses.reward_model import pairwise_loss
from dschat.losses.sft import sft_loss
from dschat.losses.value import explained_variance, value_loss

__all__ = [
    "POLICY_LOSSES",
    "cispo_loss",
    "dpo_loss",
    "entropy_bonus",
    "explained_variance",
    "gspo_loss",
    "hinge_loss",
    "ipo_loss",
    "kl_loss",
    "kto_kl",
    "kto_loss",
    "orpo_loss",
    "pairwise_loss",
    "policy_loss",
    "robust_loss",
    "sapo_loss",
    "sft_loss",
    "simpo_loss",
    "value_loss",
]

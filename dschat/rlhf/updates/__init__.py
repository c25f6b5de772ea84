"""One optimizer step of policy and critic: their losses, rollout correction, pretraining texts."""

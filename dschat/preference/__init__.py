"""Training on preferences without a reward model: objectives and reference log-probs."""

"""Models: loading, log-probs without a logits tensor, scalar heads, LoRA, plain weights of partitioned models."""

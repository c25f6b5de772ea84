"""Models: loading, chunked log-probs, scalar heads, LoRA, export of partitioned models."""

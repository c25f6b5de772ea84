"""vLLM as the rollout engine, in the training processes (https://docs.vllm.ai); imported only where it is used."""

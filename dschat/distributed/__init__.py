"""Distributed training: launch, process groups, collectives, watchdog, DeepSpeed configuration and engines."""

"""The lifecycle of a training run: output folder, logging, metric checks, signals, checkpointing, best model."""

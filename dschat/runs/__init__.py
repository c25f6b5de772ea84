"""A run from its folder to its end: log, health, signals, saving, best model."""

"""Post-training of language models: supervised fine-tuning, reward models, RLHF."""

import os

__version__ = "0.1.0"

# OpenMP reads this when torch loads it, so it has to be set here, before any module imports torch: threads that
# spin while they wait make ranks that share cores up to ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

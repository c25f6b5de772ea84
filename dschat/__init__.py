"""Post-training of language models: supervised fine-tuning, reward models, RLHF."""

import os

__version__ = "0.1.0"

# OpenMP reads this when torch loads it, so it has to be set here, before any module imports torch: threads that
# spin long while they wait make ranks that share cores up to ten times slower, threads that sleep at once are slow to
# wake. About 20 µs of spinning costs nothing measurable with twice as many threads as cores.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

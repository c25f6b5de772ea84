"""What libraries print: warnings once, by rank 0 alone, and no progress bars for files that load in a second."""

from __future__ import annotations

import logging
import os
import warnings

import datasets
import transformers

LIBRARIES = ("DeepSpeed", "dschat", "torch", "transformers", "datasets", "peft", "accelerate")


def quiet_libraries() -> None:
    """Turn off progress bars on every rank, and warnings of libraries on all ranks but 0; errors stay."""
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    if os.environ.get("RANK", "0") != "0":
        warnings.simplefilter("ignore")
        for name in LIBRARIES:
            logging.getLogger(name).setLevel(logging.ERROR)  # loggers below it inherit it

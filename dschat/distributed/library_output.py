"""What libraries print: warnings once, by rank 0 alone, and no progress bars for files that load in a second."""

from __future__ import annotations

import logging
import os
import warnings

import datasets
import transformers

LIBRARIES = ("DeepSpeed", "dschat", "torch", "transformers", "datasets", "peft", "accelerate", "py.warnings")


def quiet_libraries() -> None:
    """Turn off progress bars on every rank, and warnings of libraries on all ranks but 0; errors stay."""
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    if os.environ.get("RANK", "0") != "0":
        warnings.simplefilter("ignore")
        for name in LIBRARIES:
            logging.getLogger(name).addFilter(is_error)
            for handler in logging.getLogger(name).handlers:  # of loggers below it
                handler.addFilter(is_error)


def is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR

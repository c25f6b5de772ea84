"""Simulates a full disk for this process."""

import resource
from contextlib import contextmanager


@contextmanager
def limit_file_size(size: int):
    """Context in which no file of this process can exceed this size: further writes fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

"""A disk that is full, for this process alone."""

import resource
from contextlib import contextmanager


@contextmanager
def files_of_at_most(size: int):
    """Context in which no file of this process can exceed this size: further writes fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

"""`python -m dschat`: the command `dschat`."""

from dschat.command import entry_point

entry_point()

"""Two-rank program for test_output_folder.py: first with one folder, then with one per rank, as on two nodes."""

import sys
from pathlib import Path

from dschat.arguments.command_line import as_settings_errors
from dschat.distributed import collectives, launch
from dschat.runs import output_folder


def main() -> None:
    launch.join(seed=1)
    root = Path(sys.argv[1])
    output_folder.check_shared(root)
    output_folder.VISIBLE_WITHIN = 0.5
    own = root / f"node-{collectives.rank()}"
    own.mkdir()
    with as_settings_errors():
        output_folder.check_shared(own)


if __name__ == "__main__":
    launch.run(main)

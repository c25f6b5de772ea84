"""Two-rank program for test_start.py: every rank starts a run in a folder of its own, as on two nodes."""

import os
import sys
from pathlib import Path

from dschat.arguments import DeviceArguments, RunArguments
from dschat.distributed import launch
from dschat.runs import output_folder
from dschat.runs.set_up import start


def main() -> None:
    output_folder.VISIBLE_WITHIN = 0.5
    folder = Path(sys.argv[1], f"node-{os.environ['RANK']}")
    folder.mkdir()
    start(RunArguments(output_dir=str(folder)), DeviceArguments())


if __name__ == "__main__":
    launch.run(main)

"""Rank program of test_groups.py: the process groups of four ranks, and reductions over them."""

import json
import sys
from pathlib import Path

import torch
from torch import distributed as dist

from dschat.distributed import collectives, groups, launch

if __name__ == "__main__":
    launch.join(seed=0)
    results = {}
    for size in (1, 2, 4):
        groups.create_groups(sequence_parallel_size=size)
        sums = []
        for group in (groups.data_parallel_group(), groups.sequence_parallel_group()):
            value = torch.tensor([10.0 ** collectives.rank()])
            if group is not None:
                dist.all_reduce(value, group=group)
            sums.append(value.item())
        results[size] = [
            groups.data_parallel_rank(), groups.data_parallel_size(), groups.sequence_parallel_rank(),
            groups.sequence_parallel_size(), *sums,
        ]  # fmt: skip
    try:
        groups.create_groups(sequence_parallel_size=3)
    except ValueError as error:
        results["3"] = str(error)
    of_all_ranks = collectives.all_gather_objects(results)
    if collectives.is_main():
        Path(sys.argv[1]).write_text(json.dumps(of_all_ranks), encoding="utf-8")
    collectives.barrier()
    dist.destroy_process_group()

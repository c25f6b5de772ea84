"""Texts for the pretraining loss that is mixed into the actor's update (PTX; Ouyang et al. 2022, arXiv:2203.02155)."""

from dataclasses import replace

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from dschat.arguments import RLHFSettings
from dschat.arguments.command_line import as_settings_errors
from dschat.data.batches import GlobalBatches
from dschat.data.collators import collate_sft
from dschat.data.datasets import DataOptions
from dschat.data.micro_batches import MicroBatchLimit
from dschat.distributed import groups
from dschat.runs.fit import Batch, forward_tokens, share, to_device
from dschat.runs.set_up import load_splits


def text_options(prompts: DataOptions, source: str, max_answer_tokens: int) -> DataOptions:
    """Data options of the pretraining texts: maximum length of prompt plus response, loss on every token."""
    return replace(
        prompts,
        data_path=[source],
        max_tokens=prompts.max_tokens + max_answer_tokens,
        data_split=None,
        eval_data_path=(),
        columns={},  # the prompts' column names do not apply
        eval_fraction=0.0,
        train_on_prompt=True,
    )


class UnsupervisedBatches:
    """Micro-batches of pretraining texts for each actor update.

    Args:
        rows: prepared "sft" rows.
        limit: tokens per forward pass.
        minibatch_size: texts per update and device.
        seed: seed of the shuffle.
        pad_token_id: used for right padding.
        device: device of the tensors.
    """

    def __init__(self, rows: Dataset, *, limit: MicroBatchLimit, minibatch_size: int, seed: int, pad_token_id: int,
                 device: torch.device):  # fmt: skip
        self.rows, self.limit, self.pad_token_id, self.device = rows, limit, pad_token_id, device
        self.lengths = forward_tokens(rows, padded=limit.padded)
        size = minibatch_size * groups.data_parallel_size()
        self.batches = GlobalBatches(rows["length"], global_batch_size=size, seed=seed)

    def of_update(self, update: int) -> list[Batch]:
        """This rank's micro-batches for the given update, counted from 0 over the whole run."""
        parts = share(self.lengths, self.batches.step(update), self.limit)
        batches = [collate_sft([self.rows[row] for row in rows], pad_token_id=self.pad_token_id) for rows in parts]
        return [to_device(batch, self.device) for batch in batches]


def unsupervised_batches(
    settings: RLHFSettings, tokenizer: PreTrainedTokenizerBase, prompts: DataOptions, *, minibatch_size: int,
    limit: MicroBatchLimit, device: torch.device,
) -> UnsupervisedBatches | None:  # fmt: skip
    """The texts of --unsupervised_dataset_name, or None without it. A collective; raises SettingsError.

    Args:
        prompts: data options of the prompts, whose folders and limits apply to the texts too.
        minibatch_size: texts per update and device.
        limit: tokens per forward pass.
    """
    ppo = settings.ppo
    if not ppo.unsupervised_dataset_name:
        return None
    options = text_options(prompts, ppo.unsupervised_dataset_name, settings.rollouts.max_answer_seq_len)
    with as_settings_errors():
        return UnsupervisedBatches(
            load_splits("sft", tokenizer, options).train, limit=limit, minibatch_size=minibatch_size,
            seed=settings.run.seed, pad_token_id=tokenizer.pad_token_id, device=device,
        )  # fmt: skip

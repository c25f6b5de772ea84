"""Step 2: a reward model, trained on pairs of a chosen and a rejected response."""

from dschat.arguments import RewardModelSettings
from dschat.arguments.command_line import exit_with_help, parse

if __name__ == "__main__":
    exit_with_help(RewardModelSettings, __doc__)  # before the imports below, which take seconds

from functools import partial

import deepspeed
import torch

from dschat.data.collators import collate_preferences
from dschat.distributed import launch
from dschat.distributed.engines import Metrics
from dschat.losses.reward_model import pairwise_loss
from dschat.models.causal_lm import load_tokenizer
from dschat.models.scalar_head import TokenScores, last_token_scores, load_scalar_head
from dschat.runs import signals
from dschat.runs.exporting import export_run
from dschat.runs.fit import Batch, Objective, evaluation_means, fit
from dschat.runs.network_loading import load_network
from dschat.runs.next_commands import print_next_commands
from dschat.runs.set_up import data_options, load_splits, start
from dschat.runs.validation import one_model_problems


def pairwise(
    engine: deepspeed.DeepSpeedEngine, batch: Batch, pairs: float, *, centering_coef: float
) -> tuple[torch.Tensor, Metrics]:
    """Bradley–Terry loss normalised by the pairs of the whole step; chosen and rejected share one forward pass."""
    scores = engine(batch["input_ids"], batch["attention_mask"], prompt_lengths=batch["prompt_lengths"])  # [2B, S]
    chosen, rejected = last_token_scores(scores, batch["attention_mask"]).chunk(2)  # [B], [B]
    real = batch["pair_mask"]
    return pairwise_loss(
        chosen[real], rejected[real], margin=batch["margin"][real], centering_coef=centering_coef, normalizer=pairs
    )


def main() -> None:
    # Set up
    settings = parse(RewardModelSettings, description=__doc__, check=partial(one_model_problems, "preference"))
    model, data, run = settings.model, settings.data, settings.run
    start(run, settings.devices)
    tokenizer = load_tokenizer(
        model.model_name_or_path, add_eot_token=data.add_eot_token, trust_remote_code=model.trust_remote_code
    )
    splits = load_splits("preference", tokenizer, data_options(data, run, max_tokens=model.max_seq_len))
    objective = Objective(
        collate=partial(collate_preferences, pad_token_id=tokenizer.pad_token_id),
        count=lambda batch: batch["pair_mask"].sum(),
        loss_of=partial(pairwise, centering_coef=settings.reward_model.centering_coef),
        evaluation=partial(evaluation_means, counted="pairs"),
    )
    load = partial(
        load_network, load_model=load_scalar_head, wrapper=TokenScores, settings=settings, tokenizer=tokenizer
    )

    with signals.capture_signals() as signal_flag:
        # Fit and evaluate
        engine = fit(
            "step2_reward_model_finetuning", splits, objective, load=load, settings=settings, tokenizer=tokenizer,
            signal_flag=signal_flag,
        )  # fmt: skip

        # Export
        export_run(
            {"": engine.module.model}, run.output_dir, tokenizer, signal_flag=signal_flag, lora=settings.lora,
            bases={"": settings.model.model_name_or_path},
        )  # fmt: skip
        print_next_commands("reward", run.output_dir, [""])


if __name__ == "__main__":
    launch.run(main)

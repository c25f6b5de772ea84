"""Step 1: supervised fine-tuning of a causal language model on the responses of conversations."""

from dschat.arguments import SFTSettings
from dschat.arguments.command_line import exit_with_help, parse

if __name__ == "__main__":
    exit_with_help(SFTSettings, __doc__)  # before the imports below, which take seconds

import math
from collections.abc import Mapping
from functools import partial

import deepspeed
import torch

from dschat.data.collators import collate_sft
from dschat.distributed import launch
from dschat.distributed.engines import Metrics
from dschat.losses.sft import sft_loss
from dschat.models.causal_lm import TokenLogprobs, load_causal_lm, load_tokenizer
from dschat.runs import signals
from dschat.runs.exporting import export_run
from dschat.runs.fit import Batch, Objective, fit
from dschat.runs.network_loading import load_network
from dschat.runs.next_commands import print_next_commands
from dschat.runs.set_up import data_options, load_splits, start
from dschat.runs.validation import one_model_problems


def loss_of(engine: deepspeed.DeepSpeedEngine, batch: Batch, tokens: float) -> tuple[torch.Tensor, Metrics]:
    """Negative log-likelihood of the trained tokens, divided by their number in the whole step."""
    mask = batch["loss_mask"]
    logprobs, is_top = engine(
        batch["input_ids"], batch["attention_mask"], mask, packed_positions=batch.get("packed_positions"), with_top=True
    )  # [B, S]
    loss, _ = sft_loss(logprobs, mask, normalizer=tokens)
    return loss, {"token_accuracy": is_top.sum() / tokens}


def evaluation(sums: Mapping[str, float]) -> dict[str, float]:
    tokens = sums["count"]
    nll = sums["loss"] / tokens
    return {
        "eval_loss": nll, "perplexity": math.exp(min(nll, 700.0)), "token_accuracy": sums["token_accuracy"] / tokens,
        "tokens": tokens,
    }  # fmt: skip


def main() -> None:
    # Set up
    settings = parse(SFTSettings, description=__doc__, check=partial(one_model_problems, "sft"))
    model, supervised, data, run = settings.model, settings.supervised, settings.data, settings.run
    start(run, settings.devices)
    tokenizer = load_tokenizer(
        model.model_name_or_path, add_eot_token=data.add_eot_token, trust_remote_code=model.trust_remote_code
    )
    options = data_options(
        data, run, max_tokens=model.max_seq_len, train_on_prompt=supervised.train_on_prompt, packing=supervised.packing
    )
    splits = load_splits("sft", tokenizer, options)
    objective = Objective(
        collate=partial(collate_sft, pad_token_id=tokenizer.pad_token_id),
        count=lambda batch: batch["loss_mask"].sum(),
        loss_of=loss_of,
        evaluation=evaluation,
    )
    load = partial(
        load_network, load_model=load_causal_lm, wrapper=TokenLogprobs, settings=settings, tokenizer=tokenizer
    )

    with signals.capture_signals() as signal_flag:
        # Fit and evaluate
        engine = fit(
            "step1_supervised_finetuning", splits, objective, load=load, settings=settings, tokenizer=tokenizer,
            signal_flag=signal_flag,
        )  # fmt: skip

        # Export
        export_run(
            {"": engine.module.model}, run.output_dir, tokenizer, signal_flag=signal_flag, lora=settings.lora,
            bases={"": settings.model.model_name_or_path},
        )  # fmt: skip
        print_next_commands("sft", run.output_dir, [""])


if __name__ == "__main__":
    launch.run(main)

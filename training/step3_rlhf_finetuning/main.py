"""Step 3: RLHF, which optimises an actor against reward sources with a KL penalty to a reference model."""

from dschat.arguments import RLHFSettings
from dschat.arguments.command_line import as_settings_errors, exit_with_help, parse

if __name__ == "__main__":
    exit_with_help(RLHFSettings, __doc__)  # before the imports below, which take seconds

from transformers import PreTrainedTokenizerBase

from dschat.checkpoints.selection import find_checkpoint
from dschat.distributed import collectives, groups, launch
from dschat.models.causal_lm import load_tokenizer
from dschat.rewards.retry import RetryPolicy
from dschat.rewards.weighted_sum import Judge, Rewards, WeightedSource, load_function, model_paths, parse_reward
from dschat.rlhf.experience import MinibatchShuffle, MiniDataset
from dschat.rlhf.ppo_trainer import DeepSpeedPPOTrainer
from dschat.rlhf.rlhf_engine import DeepSpeedRLHFEngine
from dschat.rlhf.schedule import rlhf_schedule
from dschat.rlhf.training_loop import PPORun
from dschat.rlhf.updates.ptx import unsupervised_batches
from dschat.rlhf.validation import check_reward_columns, reward_entries, rlhf_problems, rlhf_warnings
from dschat.runs import signals
from dschat.runs.best_model import check_evaluation_rows
from dschat.runs.exporting import export_run
from dschat.runs.next_commands import print_next_commands
from dschat.runs.set_up import data_options, load_splits, start


def build_trainer(
    settings: RLHFSettings, tokenizer: PreTrainedTokenizerBase, *, sources: list[WeightedSource], judge: Judge | None,
    total_updates: int, updates_per_rollout: int,
) -> DeepSpeedPPOTrainer:  # fmt: skip
    """Load all models into DeepSpeed engines, and build the trainer over them. A collective."""
    ppo, rewards, seed = settings.ppo, settings.rewards, settings.run.seed
    engine = DeepSpeedRLHFEngine(
        tokenizer, settings=settings, total_steps=total_updates,
        reward_paths=model_paths(reward_entries(settings.models, rewards)),
    )  # fmt: skip
    launch.seed_all(seed + collectives.rank())  # initial weights are equal on all ranks, dropout masks differ
    scores = Rewards(
        sources, normalize=rewards.normalize_rewards, models=engine.reward_models,
        retry_policy=RetryPolicy(seconds=rewards.reward_timeout, retries=rewards.reward_retries),
    )  # fmt: skip
    return DeepSpeedPPOTrainer(
        engine, rollouts=settings.rollouts, ppo=ppo, rewards=scores, seed=seed, judge=judge,
        updates_per_rollout=updates_per_rollout,
    )  # fmt: skip


def main() -> None:
    # Set up
    settings = parse(RLHFSettings, description=__doc__, check=rlhf_problems, warn=rlhf_warnings)
    models, rollouts, ppo, run = settings.models, settings.rollouts, settings.ppo, settings.run
    device = start(run, settings.devices)
    with as_settings_errors():
        judge = load_function(rollouts.judge) if rollouts.judge else None
        sources = [parse_reward(entry) for entry in reward_entries(models, settings.rewards)]
    tokenizer = load_tokenizer(
        models.actor_model_name_or_path, add_eot_token=settings.data.add_eot_token,
        trust_remote_code=models.trust_remote_code,
    )  # fmt: skip
    options = data_options(settings.data, run, max_tokens=rollouts.max_prompt_seq_len)
    prompts = load_splits("prompt", tokenizer, options)
    with as_settings_errors():
        check_evaluation_rows(run, len(prompts.eval))
        check_reward_columns(settings, prompts.train)
        resume_from = find_checkpoint(run.output_dir, run.resume)
    schedule = rlhf_schedule(prompts.train, settings)
    trainer = build_trainer(
        settings,
        tokenizer,
        sources=sources,
        judge=judge,
        total_updates=schedule.total_updates,
        updates_per_rollout=schedule.updates_per_iteration,
    )
    shuffle = MinibatchShuffle(
        minibatch_size=schedule.minibatch_size, rank=groups.data_parallel_rank(),
        world_size=groups.data_parallel_size(), seed=run.seed, group_size=ppo.num_samples_per_prompt,
    )  # fmt: skip
    dataset = MiniDataset(
        shuffle,
        generation_batches=rollouts.generation_batches,
        ppo_epochs=ppo.ppo_epochs,
        whiten_advantages=ppo.whiten_advantages,
    )
    unsupervised = unsupervised_batches(
        settings,
        tokenizer,
        options,
        minibatch_size=schedule.minibatch_size,
        limit=trainer.engine.limit_of(trainer.engine.policy),
        device=device,
    )

    with signals.capture_signals() as signal_flag:
        # Fit and evaluate
        PPORun(
            trainer=trainer, dataset=dataset, prompts=prompts, batches=schedule.batches, unsupervised=unsupervised,
            iterations=schedule.iterations, updates_per_iteration=schedule.updates_per_iteration, settings=settings,
        ).fit(resume_from, signal_flag)  # fmt: skip

        # Export
        engine = trainer.engine
        exported = {"": engine.policy, "critic": engine.critic, "actor_ema": engine.actor_ema}
        bases = {"": models.actor_model_name_or_path, "critic": models.critic_path}
        export_run(
            exported, run.output_dir, tokenizer, signal_flag=signal_flag, lora=settings.lora, bases=bases
        )
        print_next_commands("rlhf", run.output_dir, exported)


if __name__ == "__main__":
    launch.run(main)

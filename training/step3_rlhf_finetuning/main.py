"""Step 3: RLHF, which optimises an actor against reward sources with a KL penalty to a reference model."""

from dschat.arguments import RLHFSettings
from dschat.arguments.command_line import parse, settings_of_user
from dschat.checkpoints.selection import find_checkpoint
from dschat.data.batches import GlobalBatches
from dschat.distributed import collectives, groups, launch
from dschat.models.causal_lm import load_tokenizer
from dschat.rewards.retry import RetryPolicy
from dschat.rewards.weighted_sum import Rewards, load_judge, model_paths, parse_reward
from dschat.rlhf.experience import MinibatchShuffle, MiniDataset
from dschat.rlhf.ppo_trainer import DeepSpeedPPOTrainer
from dschat.rlhf.rlhf_engine import DeepSpeedRLHFEngine
from dschat.rlhf.training_loop import PPORun
from dschat.rlhf.updates.ptx import UnsupervisedBatches, text_options
from dschat.rlhf.validation import reward_entries, rlhf_problems, rlhf_warnings
from dschat.runs import signals
from dschat.runs.best_model import check_evaluation_rows
from dschat.runs.exporting import export_run
from dschat.runs.set_up import data_options, load_splits, start


def main() -> None:
    # Set up
    settings = parse(RLHFSettings, description=__doc__, check=rlhf_problems, warn=rlhf_warnings)
    models, rollouts, ppo, rewards = settings.models, settings.rollouts, settings.ppo, settings.rewards
    data, optimizer, run = settings.data, settings.optimizer, settings.run
    device = start(run, settings.devices)
    with settings_of_user():
        resumed = find_checkpoint(run.output_dir, run.resume)
        judge = load_judge(rollouts.judge) if rollouts.judge else None
        entries = reward_entries(models, rewards)
        sources = [parse_reward(entry) for entry in entries]
    tokenizer = load_tokenizer(
        models.actor_model_name_or_path, add_eot_token=data.add_eot_token, trust_remote_code=models.trust_remote_code
    )
    options = data_options(data, run, max_tokens=rollouts.max_prompt_seq_len)
    prompts = load_splits("prompt", tokenizer, options)

    with settings_of_user():
        check_evaluation_rows(run, len(prompts.eval))
    prompts_per_rank = rollouts.per_device_generation_batch_size * rollouts.generation_batches
    minibatch_size = ppo.per_device_training_batch_size * optimizer.gradient_accumulation_steps
    updates_per_iteration = ppo.ppo_epochs * prompts_per_rank * ppo.num_samples_per_prompt // minibatch_size
    with settings_of_user():
        batches = GlobalBatches(
            prompts.train["length"], global_batch_size=prompts_per_rank * groups.data_parallel_size(), seed=run.seed,
            group_by_length=False,
        )  # fmt: skip
    iterations = run.max_steps or run.num_train_epochs * len(batches)

    engine = DeepSpeedRLHFEngine(
        tokenizer, settings=settings, total_steps=iterations * updates_per_iteration, reward_paths=model_paths(entries)
    )
    launch.seed_all(run.seed + collectives.rank())  # initial weights are equal on all ranks, dropout masks differ
    scores = Rewards(
        sources, normalize=rewards.normalize_rewards, models=engine.reward_models,
        retry_policy=RetryPolicy(seconds=rewards.reward_timeout, retries=rewards.reward_retries),
    )  # fmt: skip
    trainer = DeepSpeedPPOTrainer(engine, rollouts=rollouts, ppo=ppo, rewards=scores, seed=run.seed, judge=judge)
    shuffle = MinibatchShuffle(
        minibatch_size=minibatch_size, rank=groups.data_parallel_rank(), world_size=groups.data_parallel_size(),
        seed=run.seed, group_size=ppo.num_samples_per_prompt,
    )  # fmt: skip
    dataset = MiniDataset(
        shuffle, generation_batches=rollouts.generation_batches, ppo_epochs=ppo.ppo_epochs,
        whiten_advantages=ppo.whiten_advantages,
    )  # fmt: skip
    unsupervised = None
    if ppo.unsupervised_dataset_name:
        texts = text_options(options, ppo.unsupervised_dataset_name, rollouts.max_answer_seq_len)
        with settings_of_user():
            unsupervised = UnsupervisedBatches(
                load_splits("sft", tokenizer, texts).train, micro_batch_size=ppo.per_device_training_batch_size,
                minibatch_size=minibatch_size, seed=run.seed, pad_token_id=tokenizer.pad_token_id, device=device,
            )  # fmt: skip

    with signals.capture_signals() as received:
        # Fit, evaluating on the way
        PPORun(
            trainer=trainer, dataset=dataset, prompts=prompts, batches=batches, unsupervised=unsupervised,
            iterations=iterations, updates_per_iteration=updates_per_iteration, settings=settings,
        ).fit(resumed, received)  # fmt: skip

        # Export
        models = {"": engine.policy, "critic": engine.critic, "actor_ema": engine.actor_ema}
        export_run(models, run.output_dir, tokenizer, received=received)


if __name__ == "__main__":
    launch.run(main)

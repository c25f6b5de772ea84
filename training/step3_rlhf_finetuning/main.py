"""Step 3: PPO of an actor against a reward model, with a KL penalty towards the reference model."""

from collections.abc import Iterator
from pathlib import Path

from dschat import arguments, checkpoint, launch
from dschat.command_line import parse, settings_of_user
from dschat.data.batches import GlobalBatches, rank_share
from dschat.data.collators import collate_prompts
from dschat.data.datasets import DataSplits
from dschat.models.causal_lm import load_tokenizer
from dschat.models.weights import export_model
from dschat.rlhf.evaluation import evaluate, experience_metrics, experience_sums
from dschat.rlhf.experience import MiniDataset
from dschat.rlhf.ppo_trainer import DeepSpeedPPOTrainer
from dschat.rlhf.rewards import load_judge
from dschat.rlhf.rlhf_engine import DeepSpeedRLHFEngine
from dschat.rlhf.unsupervised import UnsupervisedBatches, text_options
from dschat.set_up import data_options, load_splits, open_log, order_of_rows, rlhf_problems, rlhf_warnings

GROUPS = (
    arguments.RLHFModelArguments,
    arguments.RolloutArguments,
    arguments.PPOArguments,
    arguments.DataArguments,
    arguments.OptimizerArguments,
    arguments.LoraArguments,
    arguments.DeviceArguments,
    arguments.RunArguments,
)


def main() -> None:
    # Set up
    groups = parse(GROUPS, description=__doc__, check=rlhf_problems, warn=rlhf_warnings)
    models, rollouts, ppo, data, optimizer, lora, devices, run = groups
    device = launch.join(seed=run.seed)
    with settings_of_user():
        resumed = checkpoint.find(run.output_dir, run.resume)
        judge = load_judge(rollouts.judge) if rollouts.judge else None
    tokenizer = load_tokenizer(models.actor_model_name_or_path, add_eot_token=data.add_eot_token)
    reward_tokenizer = load_tokenizer(models.reward_model_name_or_path or models.critic_model_name_or_path)
    options = data_options(data, run, max_tokens=rollouts.max_prompt_seq_len)
    prompts = load_splits("prompt", tokenizer, options)

    rows_per_rank = rollouts.per_device_generation_batch_size * rollouts.generation_batches
    minibatch_size = ppo.per_device_training_batch_size * optimizer.gradient_accumulation_steps
    updates_per_iteration = ppo.ppo_epochs * rows_per_rank // minibatch_size
    with settings_of_user():
        batches = GlobalBatches(
            prompts.train["length"], global_batch_size=rows_per_rank * launch.world_size(), seed=run.seed,
            group_by_length=False,
        )  # fmt: skip
    iterations = run.max_steps or run.num_train_epochs * len(batches)

    engine = DeepSpeedRLHFEngine(
        tokenizer, reward_tokenizer, models=models, ppo=ppo, optimizer=optimizer, lora=lora, devices=devices,
        rollouts=rollouts, total_steps=iterations * updates_per_iteration,
    )  # fmt: skip
    launch.seed_all(run.seed + launch.rank())  # initial weights are alike on all ranks, dropout masks are not
    trainer = DeepSpeedPPOTrainer(engine, rollouts=rollouts, ppo=ppo, seed=run.seed, judge=judge)
    dataset = MiniDataset(
        generation_batches=rollouts.generation_batches, minibatch_size=minibatch_size, ppo_epochs=ppo.ppo_epochs,
        rank=launch.rank(), world_size=launch.world_size(), seed=run.seed, whiten_advantages=ppo.whiten_advantages,
    )  # fmt: skip
    unsupervised = None
    if ppo.unsupervised_dataset_name:
        texts = text_options(options, ppo.unsupervised_dataset_name, rollouts.max_answer_seq_len)
        with settings_of_user():
            unsupervised = UnsupervisedBatches(
                load_splits("sft", tokenizer, texts).train, micro_batch_size=ppo.per_device_training_batch_size,
                minibatch_size=minibatch_size, seed=run.seed, pad_token_id=tokenizer.pad_token_id, device=device,
            )  # fmt: skip

    # Fit, evaluating on the way
    fit(
        trainer, dataset, prompts, batches, unsupervised, iterations=iterations,
        updates_per_iteration=updates_per_iteration, resumed=resumed, groups=groups,
    )  # fmt: skip

    # Export
    export_model(engine.actor.engine.module.model, run.output_dir, tokenizer)
    export_model(engine.critic.module.model, Path(run.output_dir, "critic"), tokenizer)
    if engine.actor_ema is not None:
        export_model(engine.actor_ema.module.model, Path(run.output_dir, "actor_ema"), tokenizer)


def fit(
    trainer: DeepSpeedPPOTrainer, dataset: MiniDataset, prompts: DataSplits, batches: GlobalBatches,
    unsupervised: UnsupervisedBatches | None, *, iterations: int, updates_per_iteration: int, resumed: Path | None,
    groups: tuple,
) -> None:  # fmt: skip
    """Iterations of experience and updates, from the start or from a checkpoint, evaluated and saved at intervals."""
    engine, rollouts, run = trainer.engine, trainer.rollouts, groups[-1]
    first, order = 0, order_of_rows(batches) | {"moving_average": engine.actor_ema is not None}
    if resumed:
        with settings_of_user():
            first = checkpoint.load(resumed, engines=engine.trained, same=order)["iteration"]
        engine.load_ema(resumed)
    log = open_log("step3_rlhf_finetuning", groups, run, total_steps=iterations, finished_steps=first)

    def look(iteration: int) -> None:
        metrics, samples = evaluate(
            trainer, prompts.eval, batch_size=rollouts.per_device_generation_batch_size, max_batches=run.eval_iters
        )
        if metrics:
            log.metrics(iteration, metrics, phase="eval")
            log.samples(iteration, samples, phase="eval")

    if first == 0:
        look(0)
    for iteration in range(first, iterations):
        sums, samples, minibatches = [], [], None
        for batch, sample_ids in prompts_of(iteration, prompts, batches, rollouts.per_device_generation_batch_size):
            experience = trainer.generate_experience(batch, iteration=iteration, sample_ids=sample_ids)
            recomputed = trainer.ppo.old_logprobs == "recompute"
            sums.append(experience_sums(experience, trainer.samples, recomputed=recomputed))
            samples += trainer.samples
            minibatches = dataset.add(experience, iteration=iteration)
        updates = []
        for update, minibatch in enumerate(minibatches, start=iteration * updates_per_iteration):
            texts = unsupervised.of_update(update) if unsupervised else None
            updates.append(trainer.train_rlhf(minibatch, texts))

        done = iteration + 1
        metrics = experience_metrics(sums) | mean_of(updates) | trainer.take_seconds()
        tokens = metrics["response_length"] * batches.global_batch_size
        log.metrics(done, metrics | {"tokens_per_second": tokens / metrics["seconds_rollout"]})
        samples = launch.joined_lists(samples)
        log.samples(done, samples)
        if rollouts.print_answers and done % rollouts.print_answers_interval == 0:
            for sample in samples[:3]:
                log.say(f"{sample['prompt']!r} → {sample['response']!r} (score {sample['score']:.3f})")
        if done == iterations or (run.eval_interval and done % run.eval_interval == 0):
            look(done)
        if run.save_interval and done % run.save_interval == 0:
            checkpoint.save(
                run.output_dir, done, engines=engine.trained, state={"iteration": done} | order,
                keep=run.keep_checkpoints, also=engine.save_ema,
            )  # fmt: skip
    log.close()


def prompts_of(
    iteration: int, prompts: DataSplits, batches: GlobalBatches, per_batch: int
) -> Iterator[tuple[dict[str, list], list[int]]]:
    """This rank's prompts of an iteration, batch by batch, with the position of each in the global batch.

    Positions name the samples: they are the same for any number of ranks, and unique even where a row occurs twice.
    """
    rows = batches.step(iteration)
    share = rank_share(range(len(rows)), rank=launch.rank(), world_size=launch.world_size(), micro_batch_size=per_batch)
    for mine in share:
        yield collate_prompts([prompts.train[rows[i]] for i in mine]), mine


def mean_of(updates: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}


if __name__ == "__main__":
    launch.run(main)

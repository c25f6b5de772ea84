"""The loop of step 3: iterations of experience and updates, evaluated and saved on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from dschat import checkpoint, launch, signals
from dschat.arguments import RunArguments
from dschat.command_line import settings_of_user
from dschat.data.batches import GlobalBatches, rank_share
from dschat.data.collators import collate_prompts
from dschat.data.datasets import DataSplits
from dschat.health import Health
from dschat.metrics import RunLog
from dschat.rlhf.dump import dump_inputs, dumped_update
from dschat.rlhf.evaluation import evaluate, experience_metrics, experience_sums
from dschat.rlhf.experience import MiniDataset
from dschat.rlhf.iteration import Iteration
from dschat.rlhf.ppo_trainer import DeepSpeedPPOTrainer
from dschat.rlhf.unsupervised import UnsupervisedBatches
from dschat.saving import Saving
from dschat.set_up import open_log, order_of_rows


@dataclass(frozen=True, kw_only=True)
class PPORun:
    """A run of step 3 from its start, or a checkpoint, to its end.

    Attributes:
        trainer, dataset, prompts, batches: what makes experience and cuts it.
        unsupervised: texts of the pretraining loss, or None.
        iterations, updates_per_iteration: how many there are.
        groups: every argument group, RunArguments last.
    """

    trainer: DeepSpeedPPOTrainer
    dataset: MiniDataset
    prompts: DataSplits
    batches: GlobalBatches
    unsupervised: UnsupervisedBatches | None
    iterations: int
    updates_per_iteration: int
    groups: tuple

    @property
    def run(self) -> RunArguments:
        return self.groups[-1]

    def fit(self, resumed: Path | None) -> None:
        """Run the iterations that are left.

        Args:
            resumed: a checkpoint that checkpoint.find has found good.
        """
        engine = self.trainer.engine
        order = order_of_rows(self.batches, self.prompts.train) | {"moving_average": engine.actor_ema is not None}
        first, begun, changed, state = 0, None, [], {}
        if resumed:
            with settings_of_user():
                changed = checkpoint.changed_arguments(resumed, self.groups, anyway=self.run.resume_anyway)
                state = checkpoint.load(resumed, engines=engine.trained, same=order)
            first = state["iteration"]
            engine.load_ema(resumed)
            begun = Iteration.load(resumed, engine.actor.engine.device) if state["update"] else None
        log = open_log(
            "step3_rlhf_finetuning", self.groups, self.run, total_steps=self.iterations, finished_steps=first,
            resumed=resumed, changed=changed,
        )  # fmt: skip
        with signals.noted() as received:
            saving = Saving(self.run, engine.trained, log, received, device=engine.actor.engine.device)
            health = Health(self.run, log, state.get("health"), stop_at_kl=self.trainer.ppo.stop_at_kl)
            if first == 0 and begun is None:
                self.look(0, log)
            for number in range(first, self.iterations):
                iteration = begun or self.experience(number)
                begun = None
                self.update(number, iteration, saving, order | {"health": health.state})
                done = number + 1
                skipped = [bool(update["skipped_updates"]) for update in iteration.updates]
                health.see(done, self.tell(done, iteration, log), skipped=skipped)
                last = done == self.iterations or health.ends_early
                if last or (self.run.eval_interval and done % self.run.eval_interval == 0):
                    self.look(done, log)
                state = {"iteration": done, "update": 0, "health": health.state} | order
                saving.boundary(done, state, last=last, also=engine.save_ema)
                if last:
                    break
            saving.finish()
        log.close()

    def experience(self, number: int) -> Iteration:
        """Roll out the prompts of an iteration, batch by batch."""
        iteration, trainer = Iteration(), self.trainer
        for batch, sample_ids in self.prompts_of(number):
            experience = trainer.generate_experience(batch, iteration=number, sample_ids=sample_ids)
            recomputed = trainer.ppo.old_logprobs == "recompute"
            judged = trainer.judge is not None
            iteration.sums.append(experience_sums(experience, trainer.samples, recomputed=recomputed, judged=judged))
            iteration.samples += trainer.samples
            iteration.minibatches = self.dataset.add(experience, iteration=number)
        return iteration

    def update(self, number: int, iteration: Iteration, saving: Saving, state: dict) -> None:
        """Take the updates that are left of an iteration; between two of them the run may be saved, with this state."""
        trainer, behind = self.trainer, len(iteration.updates)
        trainer.gap = iteration.gap or trainer.gap
        dumps = trainer.ppo.dump_step == number + 1 and not behind
        if dumps:
            folder = Path(self.run.output_dir, "dump", f"step-{number + 1:08d}")
            folder.mkdir(parents=True, exist_ok=True)
            dump_inputs(folder, trainer, iteration)
        for update in range(behind, len(iteration.minibatches)):
            count = number * self.updates_per_iteration + update
            texts = self.unsupervised.of_update(count) if self.unsupervised else None
            metrics: dict[str, float] = {}
            with dumped_update(folder, trainer, metrics) if dumps and update == 0 else nullcontext():
                metrics |= trainer.train_rlhf(iteration.minibatches[update], texts)
            iteration.updates.append(metrics)
            iteration.gap = trainer.gap
            done = update + 1
            if done < len(iteration.minibatches):
                saving.boundary(
                    number, {"iteration": number, "update": done} | state, update=done,
                    also=lambda folder: (trainer.engine.save_ema(folder), iteration.save(folder)),
                )  # fmt: skip

    def tell(self, done: int, iteration: Iteration, log: RunLog) -> dict[str, float]:
        """Write the metrics and samples of a finished iteration; the metrics."""
        rollouts = self.trainer.rollouts
        metrics = experience_metrics(iteration.sums) | mean_of(iteration.updates) | self.trainer.take_seconds()
        metrics["updates"] = len(iteration.updates)
        metrics["skipped_updates"] = sum(update["skipped_updates"] for update in iteration.updates)
        if metrics["seconds_rollout"]:  # a run that was resumed behind the rollout has not timed it
            tokens = metrics["response_length"] * self.batches.global_batch_size
            metrics["tokens_per_second"] = tokens / metrics["seconds_rollout"]
        log.metrics(done, metrics)
        samples = launch.joined_lists(iteration.samples)
        log.samples(done, samples)
        if rollouts.print_answers and done % rollouts.print_answers_interval == 0:
            for sample in samples[:3]:
                log.say(f"{sample['prompt']!r} → {sample['response']!r} (score {sample['score']:.3f})")
        return metrics

    def look(self, iteration: int, log: RunLog) -> None:
        """Evaluate on the held-out prompts."""
        size = self.trainer.rollouts.per_device_generation_batch_size
        metrics, samples = evaluate(self.trainer, self.prompts.eval, batch_size=size, max_batches=self.run.eval_iters)
        if metrics:
            log.metrics(iteration, metrics, phase="eval")
            log.samples(iteration, samples, phase="eval")

    def prompts_of(self, iteration: int) -> Iterator[tuple[dict[str, list], list[int]]]:
        """This rank's prompts of an iteration, batch by batch, with the position of each in the global batch.

        Positions name the samples: they are the same for any number of ranks, and unique even where a row occurs twice.
        """
        rows, size = self.batches.step(iteration), self.trainer.rollouts.per_device_generation_batch_size
        share = rank_share(range(len(rows)), rank=launch.rank(), world_size=launch.world_size(), micro_batch_size=size)
        for mine in share:
            yield collate_prompts([self.prompts.train[rows[i]] for i in mine]), mine


def mean_of(updates: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}

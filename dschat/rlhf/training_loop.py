"""The loop of step 3: iterations of experience and updates, evaluated and saved on the way."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dschat.arguments import EvaluationArguments, RunArguments
from dschat.arguments.command_line import settings_of_user
from dschat.checkpoints import checkpoint
from dschat.data.batches import GlobalBatches
from dschat.data.datasets import DataSplits
from dschat.distributed import launch, watchdog
from dschat.models.weights import export_model
from dschat.rlhf.advantages import adapted_kl_coef
from dschat.rlhf.collector import Slots
from dschat.rlhf.evaluation import evaluate, experience_metrics
from dschat.rlhf.experience import MiniDataset
from dschat.rlhf.iteration import Iteration
from dschat.rlhf.ppo_trainer import DeepSpeedPPOTrainer
from dschat.rlhf.ptx import UnsupervisedBatches
from dschat.rlhf.update_dump import dump_inputs, dumped_update
from dschat.runs import signals
from dschat.runs.best_model import Best
from dschat.runs.health import Health
from dschat.runs.run_log import RunLog
from dschat.runs.saving import Saving
from dschat.runs.set_up import open_log, order_of_rows


@dataclass(kw_only=True)
class PPORun:
    """A run of step 3 from its start, or a checkpoint, to its end.

    Attributes:
        trainer, dataset, prompts, batches: what makes experience and cuts it.
        unsupervised: texts of the pretraining loss, or None.
        iterations, updates_per_iteration: how many there are.
        evaluation: how held-out prompts are looked at.
        groups: every argument group, RunArguments last.
        slots: what gathers the experience of an iteration.
    """

    trainer: DeepSpeedPPOTrainer
    dataset: MiniDataset
    prompts: DataSplits
    batches: GlobalBatches
    unsupervised: UnsupervisedBatches | None
    iterations: int
    updates_per_iteration: int
    evaluation: EvaluationArguments
    groups: tuple
    slots: Slots = field(init=False)

    def __post_init__(self) -> None:
        self.slots = Slots(self.trainer, self.dataset, self.prompts.train, self.batches)

    @property
    def run(self) -> RunArguments:
        return self.groups[-1]

    @property
    def state(self) -> dict[str, Any]:
        """What has grown with the run, besides weights: a resumed one goes on with it."""
        trainer = self.trainer
        return {
            "taken": self.slots.taken, "kl_coef": trainer.kl_coef, "rewards": trainer.rewards.state,
            "temperature": trainer.rollouts.temperature,
        }  # fmt: skip

    def fit(self, resumed: Path | None, received: signals.Received) -> None:
        """Run the iterations that are left.

        Args:
            resumed: a checkpoint that checkpoint.find has found good.
            received: signals; it listens from the first iteration on, and does when this returns.
        """
        engine, trainer = self.trainer.engine, self.trainer
        order = order_of_rows(self.batches, self.prompts.train) | {
            "followers": sorted(engine.followers),
            "sequences_per_update": self.dataset.minibatch_size * launch.world_size(),  # the schedule counts updates
        }
        first, begun, changed, state = 0, None, [], {}
        if resumed:
            with settings_of_user():
                changed = checkpoint.changed_arguments(resumed, self.groups, anyway=self.run.resume_anyway)
                state = checkpoint.load(resumed, engines=engine.trained, same=order)
                self.load_state(state, changed)
            first = state["iteration"]
            engine.load_followers(resumed)
            begun = Iteration.load(resumed, engine.actor.engine.device) if state["update"] else None
        log = open_log(
            "step3_rlhf_finetuning", self.groups, self.run, total_steps=self.iterations, finished_steps=first,
            resumed=resumed, changed=changed,
        )  # fmt: skip
        with received.listening():
            saving = Saving(self.run, engine.trained, log, received, device=engine.actor.engine.device)
            health = Health(self.run, log, state.get("health"), stop_at_kl=trainer.ppo.stop_at_kl)
            best = Best(self.run, log, state.get("best"))
            if (first == 0 and begun is None) or best.begins:
                self.look(first, log, best)
            for number in range(first, self.iterations):
                iteration = begun or self.slots.fill(number)
                begun = None
                self.update(number, iteration, saving, order | {"health": health.state, "best": best.state})
                done = number + 1
                metrics = self.tell(done, iteration, log)
                learned = [update for update in iteration.updates if not update.get("updates_without_signal")]
                health.see(done, metrics, skipped=[bool(update["skipped_updates"]) for update in learned])
                self.adapt(done, metrics)
                last = done == self.iterations or health.ends_early
                if last or (self.run.eval_interval and done % self.run.eval_interval == 0):
                    self.look(done, log, best)
                state = {"iteration": done, "update": 0, "health": health.state, "best": best.state} | self.state
                saving.boundary(done, state | order, last=last, also=engine.save_followers)
                if last:
                    break
            saving.finish()
        log.close()

    def load_state(self, state: dict[str, Any], changed: list[str]) -> None:
        """Go on with what a checkpoint says of the run; --kl_coef counts as it is now, unless --kl_target adapts it.

        Args:
            changed: flags that have changed since, a line each; one is added for a --kl_coef that has no effect.

        Raises: ValueError if the rollouts of an unfinished iteration do not fit the flags.
        """
        trainer = self.trainer
        now, then = trainer.rollouts.temperature, state.get("temperature", trainer.rollouts.temperature)
        if state["update"] and then != now:
            raise ValueError(
                f"--temperature was {then} and is {now}, but the checkpoint lies in the middle of an iteration, whose "
                f"rollouts are compared with log-probs under {then}: go on with that, or from a checkpoint between "
                "two iterations (one without -update- in its name)"
            )
        self.slots.taken = state["taken"]
        trainer.rewards.load_state(state["rewards"])
        if trainer.ppo.kl_target:
            trainer.kl_coef = state["kl_coef"]
            if any(line.startswith("--kl_coef ") for line in changed):
                changed.append(f"--kl_coef has no effect: --kl_target goes on from {trainer.kl_coef:.6g}")

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
                metrics |= trainer.train_rlhf(
                    iteration.minibatches[update], texts, freeze_actor=count < trainer.ppo.actor_freeze_steps
                )
            iteration.updates.append(metrics)
            iteration.gap = trainer.gap
            done = update + 1
            if done < len(iteration.minibatches):
                saving.boundary(
                    number, {"iteration": number, "update": done} | self.state | state, update=done,
                    also=lambda folder: (trainer.engine.save_followers(folder), iteration.save(folder)),
                )  # fmt: skip

    def tell(self, done: int, iteration: Iteration, log: RunLog) -> dict[str, float]:
        """Write the metrics and samples of a finished iteration; the metrics."""
        rollouts = self.trainer.rollouts
        metrics = experience_metrics(iteration.sums) | mean_of(iteration.updates) | self.trainer.take_seconds()
        metrics["updates"] = len(iteration.updates)
        if self.trainer.ppo.kl_target:
            metrics["kl_coef"] = self.trainer.kl_coef
        metrics["skipped_updates"] = sum(update["skipped_updates"] for update in iteration.updates)
        if "updates_without_signal" in metrics:
            metrics["updates_without_signal"] = sum("updates_without_signal" in update for update in iteration.updates)
        if metrics["seconds_rollout"]:  # a run that was resumed behind the rollout has not timed it
            tokens = metrics["response_length"] * metrics["responses"]
            metrics["tokens_per_second"] = tokens / metrics["seconds_rollout"]
        log.metrics(done, metrics)
        watchdog.phase("logging")
        samples = launch.lists_on_main(iteration.samples)  # [] on the ranks that write nothing
        log.samples(done, samples)
        if rollouts.print_answers and done % rollouts.print_answers_interval == 0:
            for sample in samples[:3]:
                log.say(f"{sample['prompt']!r} → {sample['response']!r} (score {sample['score']:.3f})")
        return metrics

    def adapt(self, done: int, metrics: dict[str, float]) -> None:
        """What changes between two iterations: the price of KL, the reference model."""
        trainer, ppo = self.trainer, self.trainer.ppo
        if ppo.kl_target and "kl" in metrics:  # rollouts before a resume may have had no reference model
            trainer.kl_coef = adapted_kl_coef(
                trainer.kl_coef, metrics["kl"], target=ppo.kl_target, horizon=ppo.kl_horizon,
                responses=round(metrics["responses"]),
            )  # fmt: skip
        if ppo.ref_refresh_interval and done % ppo.ref_refresh_interval == 0:
            trainer.engine.refresh_reference()

    def look(self, iteration: int, log: RunLog, best: Best) -> None:
        """Evaluate on the held-out prompts."""
        trainer = self.trainer
        size = trainer.rollouts.per_device_generation_batch_size
        metrics, samples = evaluate(
            trainer,
            self.prompts.eval,
            batch_size=size,
            max_batches=self.run.eval_iters,
            num_samples=self.evaluation.eval_num_samples,
            success_score=self.evaluation.eval_success_score,
            answer=self.evaluation.eval_answer,
        )
        if metrics:
            log.metrics(iteration, metrics, phase="eval")
            log.samples(iteration, samples, phase="eval")
        model = trainer.engine.actor.engine.module.model
        with settings_of_user():
            best.see(iteration, metrics, lambda folder: export_model(model, folder, trainer.tokenizer))


def mean_of(updates: list[dict[str, float]]) -> dict[str, float]:
    """Each metric's mean over the updates that have it."""
    names = dict.fromkeys(name for update in updates for name in update)
    having = {name: [update[name] for update in updates if name in update] for name in names}
    return {name: sum(values) / len(values) for name, values in having.items()}

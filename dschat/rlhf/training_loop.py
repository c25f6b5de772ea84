"""The training loop of step 3: iterations of rollouts and updates, with evaluation and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from dschat.arguments import RLHFSettings
from dschat.checkpoints.selection import newest_checkpoint
from dschat.data.batches import GlobalBatches
from dschat.data.datasets import DataSplits
from dschat.distributed import collectives, groups, watchdog
from dschat.models.weights import export_model
from dschat.rlhf.advantages import adapted_kl_coef
from dschat.rlhf.collector import RolloutCollector
from dschat.rlhf.evaluation import evaluate
from dschat.rlhf.experience import MiniDataset
from dschat.rlhf.iteration import Iteration
from dschat.rlhf.missing_scores import MissingScores, RewardsUnavailable
from dschat.rlhf.ppo_trainer import DeepSpeedPPOTrainer
from dschat.rlhf.rollouts.metrics import experience_metrics
from dschat.rlhf.update_dump import UpdateDump, dump_inputs
from dschat.rlhf.updates.optimizer_steps import discard
from dschat.rlhf.updates.ptx import UnsupervisedBatches
from dschat.runs.run_log import RunLog
from dschat.runs.session import ResumePoint, TrainingSession, data_fingerprint
from dschat.runs.signals import SignalFlag
from dschat.runs.throughput import Work, throughput_metrics


@dataclass(kw_only=True)
class PPORun:
    """A run of step 3 from its start, or a checkpoint, to its end.

    Attributes:
        trainer, dataset, prompts, batches: as in RolloutCollector.
        unsupervised: texts of the pretraining loss, or None.
        iterations, updates_per_iteration: length of the run.
        settings: all argument groups.
        collector: collects the experience of an iteration.
        missing_scores: ends the run after too many iterations without any score.
    """

    trainer: DeepSpeedPPOTrainer
    dataset: MiniDataset
    prompts: DataSplits
    batches: GlobalBatches
    unsupervised: UnsupervisedBatches | None
    iterations: int
    updates_per_iteration: int
    settings: RLHFSettings
    collector: RolloutCollector = field(init=False)
    missing_scores: MissingScores = field(init=False)

    def __post_init__(self) -> None:
        self.collector = RolloutCollector(self.trainer, self.dataset, self.prompts.train, self.batches)
        self.missing_scores = MissingScores(
            limit=self.settings.run.max_bad_steps,
            sources={name: source.entry for name, source in self.trainer.rewards.sources.items()},
        )

    @property
    def state(self) -> dict[str, Any]:
        """Trainer state to checkpoint besides the models: what a resumed run restores."""
        trainer = self.trainer
        return {
            "prompts_consumed": self.collector.prompts_consumed, "kl_coef": trainer.kl_coef,
            "rewards": trainer.rewards.state, "temperature": trainer.rollouts.temperature,
            "iterations_without_scores": self.missing_scores.iterations,
        }  # fmt: skip

    def fit(self, resume_from: Path | None, signal_flag: SignalFlag) -> None:
        """Run the remaining iterations.

        Args:
            resume_from: a checkpoint verified by find_checkpoint.
            signal_flag: its handlers are active from the first iteration on, and still when this returns.
        """
        engine = self.trainer.engine
        session = self.session(resume_from, signal_flag)
        unfinished = None
        if resume_from:
            engine.load_shadow_models(resume_from)
            if session.resumed_state["update"]:
                unfinished = Iteration.load(resume_from, engine.policy.device)
        with session:
            if session.evaluates_first:
                self.evaluate(session.first_step, session)
            for number in range(session.first_step, self.iterations):
                iteration = unfinished or self.collector.collect(number)
                unfinished = None
                self.update(number, iteration, session)
                done = number + 1
                metrics = self.log_iteration(done, iteration, session.log)
                trained_updates = [update for update in iteration.updates if not update.get("updates_without_signal")]
                skipped = [bool(update["skipped_updates"]) for update in trained_updates]
                session.health.check_metrics(done, metrics, skipped=skipped)
                self.update_kl_coef_and_ref(done, metrics)
                reason_to_end = self.missing_scores.check_metrics(metrics)
                if reason_to_end:
                    self.save_and_end(done, reason_to_end, session)
                if session.evaluation_is_due(done):
                    self.evaluate(done, session)
                session.save_if_due(done, self.state, extra_writer=engine.save_shadow_models)
                if session.is_last(done):
                    break

    def session(self, resume_from: Path | None, signal_flag: SignalFlag) -> TrainingSession:
        """Create the session of this run; with a checkpoint it restores the trainer's state."""
        engine = self.trainer.engine
        fingerprint = data_fingerprint(self.batches, self.prompts.train) | {
            "shadow_models": sorted(engine.shadow_models),
            # The learning-rate schedule counts updates.
            "sequences_per_update": self.dataset.shuffle.minibatch_size * groups.data_parallel_size(),
        }
        return TrainingSession(
            "step3_rlhf_finetuning", settings=self.settings, engines=engine.trained, total_steps=self.iterations,
            resume=ResumePoint(checkpoint=resume_from, fingerprint=fingerprint, restore=self.load_state),
            signal_flag=signal_flag, stop_at_kl=self.trainer.ppo.stop_at_kl,
        )  # fmt: skip

    def save_and_end(self, done: int, reason: str, session: TrainingSession) -> NoReturn:
        """End the run, with a checkpoint of the finished iterations. A collective."""
        session.save_if_due(done, self.state, extra_writer=self.trainer.engine.save_shadow_models, force=True)
        newest = newest_checkpoint(self.settings.run.output_dir)
        session.log.info(
            f"{reason}. The run ends here; "
            + (f"the newest checkpoint is {newest}: " if newest else "there is no checkpoint: ")
            + "restore the reward source, then continue with --resume auto"
        )
        raise RewardsUnavailable

    def load_state(self, state: Mapping[str, Any], changed: list[str]) -> None:
        """Restore `state`. The flag --kl_coef overrides the saved coefficient, unless --kl_target adapts it.

        Args:
            changed: one line per flag changed since the checkpoint; a --kl_coef that has no effect is appended.

        Raises: ValueError if the rollouts of an unfinished iteration do not match the flags.
        """
        trainer = self.trainer
        temperature, saved = trainer.rollouts.temperature, state.get("temperature", trainer.rollouts.temperature)
        if state["update"] and saved != temperature:
            raise ValueError(
                f"--temperature was {saved} and is {temperature}, but the checkpoint is in the middle of an iteration, "
                f"whose rollouts were sampled under {saved}: resume with that, or from a checkpoint between two "
                "iterations (one without -update- in its name)"
            )
        self.collector.prompts_consumed = state["prompts_consumed"]
        trainer.rewards.load_state(state["rewards"])
        self.missing_scores.iterations = state.get("iterations_without_scores", 0)
        if trainer.ppo.kl_target:
            trainer.kl_coef = state["kl_coef"]
            if any(line.startswith("--kl_coef ") for line in changed):
                changed.append(f"--kl_coef has no effect: --kl_target continues from {trainer.kl_coef:.6g}")

    def update(self, number: int, iteration: Iteration, session: TrainingSession) -> None:
        """Run the remaining updates of an iteration; checkpoints may be written between two of them."""
        trainer, finished = self.trainer, len(iteration.updates)
        dumping = trainer.ppo.dump_step == number + 1 and not finished
        if dumping:
            folder = Path(self.settings.run.output_dir, "dump", f"step-{number + 1:08d}")
            dumping = dump_inputs(folder, trainer, iteration)
        for update in range(finished, len(iteration.minibatches)):
            update_of_run = number * self.updates_per_iteration + update
            texts = self.unsupervised.of_update(update_of_run) if self.unsupervised else ()
            mismatch_measured = any("rollout_logprob_mismatch_mean" in earlier for earlier in iteration.updates)
            shape = iteration.minibatches[update].response_mask.shape
            dump = UpdateDump(folder, shape) if dumping and update == 0 else None
            freeze_actor = update_of_run < trainer.ppo.actor_freeze_steps
            iteration.work += trainer.update_work(iteration.minibatches[update], freeze_actor=freeze_actor)
            with iteration.timings.measure("update"):
                metrics = trainer.train_rlhf(
                    iteration.minibatches[update], texts, freeze_actor=freeze_actor,
                    measure_mismatch=trainer.old_logprobs != "recompute" and not mismatch_measured,
                    record=dump.record if dump else discard,
                )  # fmt: skip
            if dump:
                dump.write(metrics)
            iteration.updates.append(metrics)
            done = update + 1
            if done < len(iteration.minibatches):
                session.save_if_due(
                    number, self.state, update=done,
                    extra_writer=lambda folder: (trainer.engine.save_shadow_models(folder), iteration.save(folder)),
                )  # fmt: skip

    def log_iteration(self, done: int, iteration: Iteration, log: RunLog) -> dict[str, float]:
        """Log the metrics and samples of a finished iteration; returns the metrics."""
        rollouts = self.trainer.rollouts
        metrics = experience_metrics(iteration.sums) | mean_of(iteration.updates)
        timings = iteration.timings
        metrics |= {f"seconds_{phase}": timings[phase] for phase in ("rollout", "scoring", "update")}
        metrics["updates"] = len(iteration.updates)
        if self.trainer.ppo.kl_target:
            metrics["kl_coef"] = self.trainer.kl_coef
        metrics["skipped_updates"] = sum(update["skipped_updates"] for update in iteration.updates)
        if "updates_without_signal" in metrics:
            metrics["updates_without_signal"] = sum("updates_without_signal" in update for update in iteration.updates)
        if metrics["seconds_rollout"]:  # 0 if the run was resumed after the rollout
            tokens = metrics["response_length"] * metrics["responses"]
            metrics["tokens_per_second"] = tokens / metrics["seconds_rollout"]
        policy = self.trainer.engine.policy
        work = Work(*collectives.sum_over_ranks(iteration.work.tensor(policy.device)).tolist())
        metrics |= throughput_metrics(work, seconds=timings["update"], engine=policy, prefix="update_")
        log.metrics(done, metrics)
        watchdog.phase("logging")
        samples = collectives.gather_lists_to_main(iteration.samples)  # [] on all ranks but the main one
        log.samples(done, samples)
        if rollouts.print_answers and done % rollouts.print_answers_interval == 0:
            for sample in samples[:3]:
                score = "no score" if sample["score"] is None else f"score {sample['score']:.3f}"
                log.info(f"{sample['prompt']!r} → {sample['response']!r} ({score})")
        return metrics

    def update_kl_coef_and_ref(self, done: int, metrics: dict[str, float]) -> None:
        """Between two iterations: adapt the KL coefficient (--kl_target) and refresh the reference model."""
        trainer, ppo = self.trainer, self.trainer.ppo
        if ppo.kl_target and "kl" in metrics:  # rollouts before a resume may have had no reference model
            trainer.kl_coef = adapted_kl_coef(
                trainer.kl_coef, metrics["kl"], target=ppo.kl_target, horizon=ppo.kl_horizon,
                responses=round(metrics["responses"]),
            )  # fmt: skip
        if ppo.ref_refresh_interval and done % ppo.ref_refresh_interval == 0:
            trainer.engine.refresh_reference()

    def evaluate(self, iteration: int, session: TrainingSession) -> None:
        """Evaluate on the held-out prompts."""
        trainer, evaluation = self.trainer, self.settings.evaluation
        metrics, samples = evaluate(
            trainer,
            self.prompts.eval,
            batch_size=trainer.rollouts.per_device_generation_batch_size,
            max_batches=self.settings.run.eval_iters,
            num_samples=evaluation.eval_num_samples,
            success_score=evaluation.eval_success_score,
            answer=evaluation.eval_answer,
        )
        model = trainer.engine.policy.module.model
        session.log_evaluation(
            iteration, metrics, export=lambda folder: export_model(model, folder, trainer.tokenizer), samples=samples
        )


def mean_of(updates: list[dict[str, float]]) -> dict[str, float]:
    """Mean of each metric over the updates that report it."""
    names = dict.fromkeys(name for update in updates for name in update)
    values_of = {name: [update[name] for update in updates if name in update] for name in names}
    return {name: sum(values) / len(values) for name, values in values_of.items()}

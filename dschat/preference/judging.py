"""Judge the prompts of a run in batches over all ranks, saving each batch, and write the file of pairs at the end."""

from collections.abc import Callable, Sequence
from operator import itemgetter

from dschat.arguments.command_line import SettingsError
from dschat.distributed import collectives, groups
from dschat.preference.judged_batches import JudgedBatch, JudgedBatches, remaining_batches
from dschat.rewards.retry import NoScores
from dschat.runs import signals

JudgeBatch = Callable[[list[int]], JudgedBatch]  # indices of prompts → their pairs


def judge_all(judge_batch: JudgeBatch, judged: JudgedBatches, *, prompts: int, batch_size: int) -> list[JudgedBatch]:
    """Judge the remaining batches, split over the ranks.

    Args:
        judge_batch: samples, scores and pairs the responses to the prompts with these indices.
        prompts: number of prompts of the run.
        batch_size: prompts per batch.

    Returns: the judged batches of all ranks, unordered, on the main rank; elsewhere only those of the resumed run.

    Raises:
        ExitAfterSave: any rank received a signal; judged batches are saved.
        SettingsError: a rank cannot write, or its judge keeps failing; judged batches are saved.
    """
    remaining = remaining_batches(prompts, batch_size=batch_size, earlier=judged.earlier)
    size = groups.data_parallel_size()
    rounds = [remaining[start : start + size] for start in range(0, len(remaining), size)]
    pairs = sum(len(batch.pairs) for batch in judged.earlier)
    if judged.earlier:
        log(f"resuming: {prompts - sum(map(len, remaining))} of {prompts} prompts are judged, {pairs} pairs")
    new_batches: list[JudgedBatch] = []
    with signals.capture_signals() as signal_flag, signal_flag.installed():
        for number, batches in enumerate(rounds, start=1):
            batch, problem = _judge_and_save(judge_batch, judged, batches)
            new_batches += [batch] if batch is not None else []
            state = problem, signal_flag.number, len(batch.pairs) if batch is not None and problem is None else 0
            problems, signal_numbers, counts = zip(*collectives.all_gather_objects(state), strict=True)
            pairs += sum(counts)
            log(f"{number}/{len(rounds)} batches on each process, {pairs} pairs")
            if any(problems):
                raise SettingsError(
                    f"{'; '.join(filter(None, problems))}: the batches judged so far are saved; once this is fixed, "
                    "continue with --resume auto"
                )
            if any(signal_numbers) and number < len(rounds):
                log("stopped by a signal; continue with --resume auto")
                raise signals.ExitAfterSave
    return judged.earlier + collectives.gather_lists_to_main(new_batches)


def _judge_and_save(
    judge_batch: JudgeBatch, judged: JudgedBatches, batches: Sequence[list[int]]
) -> tuple[JudgedBatch | None, str | None]:
    """Judge this rank's batch of a round and append it to the part file; returns it, and a problem if there was one."""
    rank, batch = groups.data_parallel_rank(), None
    if rank >= len(batches):  # the last round may have fewer batches than ranks
        return None, None
    try:
        batch = judge_batch(batches[rank])
        if batch.scored:  # a batch without scores is not saved: --resume auto retries it
            judged.append(batch)
    except (NoScores, OSError) as error:
        return batch, str(error)
    return batch, None


def write_pairs(batches: Sequence[JudgedBatch], judged: JudgedBatches, *, prompts: int, samples: int) -> None:
    """Write the final file, in the order of the prompts. A collective; the main rank has all batches.

    Raises: SettingsError without pairs, or if writing fails.
    """
    rows = [row for _, row in sorted((pair for batch in batches for pair in batch.pairs), key=itemgetter(0))]
    if collectives.broadcast_from_main(not rows):
        raise SettingsError(
            f"no preference pairs from {prompts} prompts: the {samples} responses to each have equal scores, or none: "
            "raise --num_samples_per_prompt or --temperature, or use a judge (or rewards) with finer scores"
        )
    problem = None
    if collectives.is_main():
        try:
            path = judged.finish(rows)
            unscored = sum(batch.unscored for batch in batches)
            omitted = f"; {unscored} responses without a score are in no pair" if unscored else ""
            log(f"{len(rows)} pairs from {prompts} prompts written to {path}{omitted}")
        except OSError as error:
            problem = f"{error}: the judged batches are saved; free disk space and continue with --resume auto"
    problem = collectives.all_gather_objects(problem)[0]
    if problem:
        raise SettingsError(problem)


def log(text: str) -> None:
    """Print on the main rank."""
    if collectives.is_main():
        print(f"[make_preferences] {text}", flush=True)

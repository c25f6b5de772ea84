"""Flags for the evaluation of step 3 on held-out prompts."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat.arguments.flags import flag


@dataclass
class EvaluationArguments:
    """Evaluation with several responses per prompt: mean@n, pass@k, maj@n."""

    _argument_group_name: ClassVar[str] = "evaluation"
    eval_num_samples: int = flag(
        1,
        "Responses sampled for each evaluation prompt; above 1, mean@n, pass@k and maj@n are logged.",
        at_least=1,
        at_most=65536,
        on_resume="apply",
    )
    eval_success_score: float = flag(
        1.0,
        "A response counts as correct if its score is at least this.",
        needs=["eval_num_samples"],
        on_resume="apply",
    )
    eval_answer: Literal["last_number", "boxed", "tag", "text"] = flag(
        "last_number",
        "Part of a response that is its final answer in the majority vote of maj@n.",
        needs=["eval_num_samples"],
        on_resume="apply",
    )

    def problems(self) -> list[str]:
        return []

"""Flags for the evaluation of step 3 on held-out prompts."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat.arguments.command_line import flag


@dataclass
class EvaluationArguments:
    """Evaluation with several responses per prompt: mean@n, pass@k, maj@n."""

    _argument_group_name: ClassVar[str] = "evaluation"
    eval_num_samples: int = flag(1, "responses to each held-out prompt; above 1: mean@n, pass@k, maj@n", at_least=1,
                                at_most=65536)  # fmt: skip
    eval_success_score: float = flag(1.0, "a response is right if its score is at least this",
                                     needs=["eval_num_samples"])  # fmt: skip
    eval_answer: Literal["last_number", "boxed", "tag", "text"] = flag(
        "last_number", "what of a response is its answer, for the majority", needs=["eval_num_samples"]
    )

    def problems(self) -> list[str]:
        return []

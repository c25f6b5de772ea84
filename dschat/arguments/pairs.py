"""make_preferences.py: pairs sampled from a model and judged."""

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from dschat.arguments.data import DataArguments
from dschat.arguments.run import DeviceArguments, RunArguments
from dschat.arguments.sampling import SamplingArguments
from dschat.command_line import flag, subset

_NOT_OF_PROMPTS = ("response_column", "margin_column", "text_column", "add_eot_token")


@dataclass
class PairArguments(SamplingArguments):
    """Pairs sampled from a model and labelled by a judge or by rewards."""

    model_name_or_path: str = flag("", "the causal language model that answers")
    num_samples_per_prompt: int = flag(4, "answers sampled for each prompt", at_least=2)
    pairs_per_prompt: int = flag(1, "at most so many pairs of each prompt's answers", at_least=1)

    def problems(self) -> list[str]:
        needed = [] if self.model_name_or_path else ["--model_name_or_path: is needed"]
        return needed + super().problems()


PromptDataArguments = subset(
    DataArguments, "PromptDataArguments",
    keep=[field.name for field in fields(DataArguments) if field.name not in _NOT_OF_PROMPTS],
)  # fmt: skip
PairDeviceArguments = subset(DeviceArguments, "PairDeviceArguments", keep=["dtype", "deterministic"])
_Folder = subset(RunArguments, "_Folder", keep=["output_dir", "seed", "collective_timeout", "local_rank"])


@dataclass
class PairRunArguments(_Folder):
    """What is written, and whether an earlier run is gone on with: nothing is trained, so nothing else of a run."""

    _argument_group_name: ClassVar[str] = "run"
    resume: Literal["auto", "never"] = flag(
        "never", "auto: go on with the judged batches of OUTPUT_DIR; never: begin anew, they are moved aside"
    )
    overwrite: bool = flag(False, "replace a finished OUTPUT_DIR/preferences.jsonl, once the new one is complete")

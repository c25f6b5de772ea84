"""Flags of make_preferences.py: the subset of the training flags that applies without training."""

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from dschat.arguments.data import DataArguments
from dschat.arguments.flags import flag, subset
from dschat.arguments.run import DeviceArguments, RunArguments

_UNUSED_FOR_PROMPTS = ("response_column", "margin_column", "text_column", "add_eot_token")


PromptDataArguments = subset(
    DataArguments, "PromptDataArguments",
    keep=[field.name for field in fields(DataArguments) if field.name not in _UNUSED_FOR_PROMPTS],
)  # fmt: skip
PairDeviceArguments = subset(
    DeviceArguments, "PairDeviceArguments",
    keep=[
        "dtype", "max_tokens_per_micro_batch", "remove_padding", "share_prompts", "compile", "kernels", "deterministic",
    ],
)  # fmt: skip
_OutputArguments = subset(
    RunArguments,
    "_OutputArguments",
    keep=["output_dir", "seed", "collective_timeout", "rendezvous_timeout", "local_rank"],
)


@dataclass
class PairRunArguments(_OutputArguments):
    """Output and resume; nothing is trained, so no other flags of a run apply."""

    _argument_group_name: ClassVar[str] = "run"
    resume: Literal["auto", "never"] = flag(
        "never",
        "Resume from the scored batches in OUTPUT_DIR (auto), or move them aside and start over (never).",
        on_resume="ignore",
    )
    overwrite: bool = flag(
        False, "Replace an existing OUTPUT_DIR/preferences.jsonl once the new one is complete.", on_resume="apply"
    )

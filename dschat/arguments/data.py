"""Flags for training and evaluation data."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat.arguments.flags import flag
from dschat.arguments.run import unwritable

COLUMN_HELP = "Column that contains"
COLUMN_DEFAULT = "Default: detected by its usual names."


@dataclass
class DataArguments:
    """Data sources, and how their rows are split, filtered and mapped to fields."""

    _argument_group_name: ClassVar[str] = "data"
    data_path: list[str] = flag(
        [],
        "Training data: files, folders, save_to_disk folders, hub names, NAME=PATH or reasoning_gym:TASK, "
        "each optionally with :WEIGHT, its share in the mixture.",
        on_resume="refuse",
    )
    data_split: str | None = flag(
        None,
        "Proportions of the rows for steps 1, 2 and 3, such as 2,4,4. Default: every step uses all rows.",
        on_resume="refuse",
    )
    data_output_path: str | None = flag(
        None, "Folder for the prepared Arrow data. Default: OUTPUT_DIR/data.", on_resume="apply"
    )
    eval_data_path: list[str] = flag(
        [],
        "Evaluation data, in the form of --data_path. Default: the test splits of --data_path, or a held-out "
        "fraction of its rows.",
        on_resume="refuse",
    )
    eval_fraction: float = flag(
        0.05,
        "Fraction of the rows held out for evaluation where a source has no test split.",
        at_least=0,
        below=1,
        on_resume="refuse",
    )
    max_bad_rows: int = flag(
        10,
        "Number of invalid rows to skip and log; one more ends the run with an error that lists the first ones.",
        at_least=0,
        on_resume="apply",
    )
    overlong: Literal["truncate", "drop"] = flag(
        "truncate",
        "Sequences over the length limit: truncate the prompt on the left, or drop the row.",
        on_resume="refuse",
    )
    drop_duplicates: bool = flag(
        False, "Keep only the first of the rows of a source with equal training content.", on_resume="refuse"
    )
    prompt_column: str | None = flag(None, f"{COLUMN_HELP} the prompt. {COLUMN_DEFAULT}", on_resume="refuse")
    response_column: str | None = flag(None, f"{COLUMN_HELP} the response. {COLUMN_DEFAULT}", on_resume="refuse")
    messages_column: str | None = flag(
        None, f"{COLUMN_HELP} the list of chat messages. {COLUMN_DEFAULT}", on_resume="refuse"
    )
    chosen_column: str | None = flag(
        None, f"{COLUMN_HELP} the preferred response. {COLUMN_DEFAULT}", on_resume="refuse"
    )
    rejected_column: str | None = flag(
        None, f"{COLUMN_HELP} the rejected response. {COLUMN_DEFAULT}", on_resume="refuse"
    )
    margin_column: str | None = flag(
        None,
        f"{COLUMN_HELP} the margin of the chosen over the rejected response, in units of the score. {COLUMN_DEFAULT}",
        on_resume="refuse",
    )
    text_column: str | None = flag(None, f"{COLUMN_HELP} plain text. {COLUMN_DEFAULT}", on_resume="refuse")
    system_column: str | None = flag(None, f"{COLUMN_HELP} the system prompt. {COLUMN_DEFAULT}", on_resume="refuse")
    tools_column: str | None = flag(
        None, f"{COLUMN_HELP} the tools for the chat template, as a JSON list. {COLUMN_DEFAULT}", on_resume="refuse"
    )
    parse_special_tokens: bool = flag(
        False,
        "Encode control tokens written in a message's content (such as <|im_end|>) as special tokens instead "
        "of plain text.",
        on_resume="refuse",
    )
    add_eot_token: bool = flag(
        False,
        "Add <|endoftext|> to the tokenizer and use it as the end-of-sequence token of responses.",
        on_resume="refuse",
    )

    def problems(self) -> list[str]:
        problems = [] if self.data_path else ["--data_path: name at least one file, folder or hub data set"]
        return problems + unwritable("--data_output_path", self.data_output_path)

"""Flags for training and evaluation data."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat.arguments.command_line import flag
from dschat.arguments.run import unwritable

COLUMN_HELP = "column that holds"


@dataclass
class DataArguments:
    """Data sources, and how their rows are split, filtered and mapped to fields."""

    _argument_group_name: ClassVar[str] = "data"
    data_path: list[str] = flag(
        [],
        "files, folders, save_to_disk folders, hub names, NAME=PATH or reasoning_gym:TASK, each with a :WEIGHT or not",
        on_resume="refuse",
    )
    data_split: str | None = flag(
        None, "shares of the rows for steps 1, 2, 3, such as 2,4,4; default: all to each", on_resume="refuse"
    )
    data_output_path: str | None = flag(None, "folder of the prepared Arrow data; default: OUTPUT_DIR/data")
    eval_data_path: list[str] = flag(
        [], "rows to evaluate on; default: the sources' own test split, or a held-out share",
        on_resume="refuse",
    )
    eval_fraction: float = flag(
        0.05, "share held out where a source has no split for it", at_least=0, below=1, on_resume="refuse"
    )
    max_bad_rows: int = flag(10, "bad rows to set aside before the run stops with the first ones named", at_least=0)
    overlong: Literal["truncate", "drop"] = flag(
        "truncate", "too long: cut the prompt from the left, or drop the row", on_resume="refuse"
    )
    drop_duplicates: bool = flag(
        False, "keep the first of rows of a source that are equal in what is learnt from them", on_resume="refuse"
    )
    prompt_column: str | None = flag(None, f"{COLUMN_HELP} the prompt", on_resume="refuse")
    response_column: str | None = flag(None, f"{COLUMN_HELP} the response", on_resume="refuse")
    messages_column: str | None = flag(None, f"{COLUMN_HELP} the list of messages", on_resume="refuse")
    chosen_column: str | None = flag(None, f"{COLUMN_HELP} the better answer", on_resume="refuse")
    rejected_column: str | None = flag(None, f"{COLUMN_HELP} the worse answer", on_resume="refuse")
    margin_column: str | None = flag(
        None, f"{COLUMN_HELP} by how much the better answer is better", on_resume="refuse"
    )
    text_column: str | None = flag(None, f"{COLUMN_HELP} plain text", on_resume="refuse")
    system_column: str | None = flag(None, f"{COLUMN_HELP} the system prompt", on_resume="refuse")
    tools_column: str | None = flag(
        None, f"{COLUMN_HELP} the tools of the chat template, a JSON list", on_resume="refuse"
    )
    parse_special_tokens: bool = flag(
        False, "what spells a control token (such as <|im_end|>) in a content becomes that token; default: plain text",
        on_resume="refuse",
    )
    add_eot_token: bool = flag(
        False, "add <|endoftext|> to the tokenizer and end responses with it", on_resume="refuse"
    )

    def problems(self) -> list[str]:
        problems = [] if self.data_path else ["--data_path: name at least one file, folder or hub data set"]
        return problems + unwritable("--data_output_path", self.data_output_path)

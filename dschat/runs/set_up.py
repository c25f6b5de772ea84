"""Set up a step from its argument groups: join the launch, create the output folder, load the data splits."""

from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from transformers import PreTrainedTokenizerBase

from dschat.arguments import DataArguments, DeviceArguments, RunArguments
from dschat.arguments.command_line import as_settings_errors, raise_mistakes
from dschat.data.datasets import DataOptions, DataSplits, build_dataset
from dschat.distributed import collectives, launch, watchdog
from dschat.distributed.terminal import fitted, printable
from dschat.runs.output_folder import check_shared, lock_folder


def data_options(
    data: DataArguments, run: RunArguments, *, max_tokens: int, train_on_prompt: bool = False, packing: bool = False,
    phase: int | None = None,
) -> DataOptions:  # fmt: skip
    """Convert the data flags of a step to the options of dschat.data."""
    return DataOptions(
        data_path=data.data_path,
        output_path=data.data_output_path or str(Path(run.output_dir, "data")),
        run_path=run.output_dir,
        max_tokens=max_tokens,
        data_split=data.data_split,
        seed=run.seed,
        eval_data_path=data.eval_data_path,
        eval_fraction=data.eval_fraction,
        overlong=data.overlong,
        max_bad_rows=data.max_bad_rows,
        columns=named_columns(data),
        drop_duplicates=data.drop_duplicates,
        parse_special_tokens=data.parse_special_tokens,
        train_on_prompt=train_on_prompt,
        packing=packing,
        phase=phase,
    )


def named_columns(data: DataArguments) -> dict[str, str]:
    """Field of a record → the column that its flag names."""
    columns = {
        "prompt": data.prompt_column,
        "response": data.response_column,
        "messages": data.messages_column,
        "chosen": data.chosen_column,
        "rejected": data.rejected_column,
        "margin": data.margin_column,
        "text": data.text_column,
        "system": data.system_column,
        "tools": data.tools_column,
    }
    return {field: column for field, column in columns.items() if column}


def load_splits(kind: str, tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> DataSplits:
    """Load the training and evaluation rows of a step, prepared once per node; print a summary.

    Raises: SettingsError on every rank, if the data cannot be used.
    """
    watchdog.phase("data preparation")
    splits, problem = None, None
    with collectives.main_of_node_first():
        try:
            splits = build_dataset(kind, tokenizer, options, verify=collectives.is_main_of_node())
        except ValueError as error:
            problem = str(error)
    problems = collectives.all_gather_objects(problem)  # all ranks raise together, or the others would hang
    raise_mistakes(sorted({problem for problem in problems if problem}))
    if collectives.is_main():
        print(fitted(printable(splits.report.summary())), flush=True)
    return splits


def start(run: RunArguments, devices: DeviceArguments) -> torch.device:
    """Join the process group, create and lock the output folder; return this rank's device. Raises SettingsError."""
    device = launch.join(
        seed=run.seed, collective_timeout=run.collective_timeout, rendezvous_timeout=run.rendezvous_timeout,
        deterministic=devices.deterministic,
    )  # fmt: skip
    with as_settings_errors():
        make_output_folder(run.output_dir)
        lock_folder(run.output_dir)
        check_shared(run.output_dir)
    if collectives.is_main():
        processes = collectives.world_size()
        print(f"{processes} process{'es' * (processes > 1)} on {get_accelerator().current_device_name()}", flush=True)
    return device


def make_output_folder(output_dir: str) -> None:
    """Create the output folder, once the settings are validated. A collective; raises ValueError if that fails."""
    problem = None
    if collectives.is_main():
        try:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"--output_dir {output_dir}: cannot be created ({error.strerror}); name another folder"
    problem = collectives.all_gather_objects(problem)[0]
    if problem:
        raise ValueError(problem)

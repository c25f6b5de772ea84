"""Evaluation of the single-model steps; training itself is tested by running the steps (test_steps.py)."""

import pytest
import torch
from datasets import Dataset
from torch import nn

from dschat import arguments
from dschat.data.datasets import DataSplits
from dschat.data.micro_batches import MicroBatchLimit
from dschat.distributed import collectives
from dschat.runs import signals
from dschat.runs.fit import Objective, collated, evaluation, fit

LENGTHS = [3, 9, 1, 7, 5, 2, 8, 4, 6, 10, 11]


class Scale(nn.Module):
    """Engine stub: a module with a device."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))
        self.sizes: list[int] = []
        self.modes: set[bool] = set()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(values))
        self.modes.add(self.training or torch.is_grad_enabled())
        return self.factor * values


def objective() -> Objective:
    def loss_of(engine, batch, count):
        scaled = engine(batch["values"])[batch["real"]]
        return scaled.sum() / count, {"squares": scaled.square().sum() / count}

    return Objective(
        collate=lambda rows: {
            "values": torch.tensor([float(row["length"]) for row in rows] or [1e6]),
            "real": torch.tensor([True] * len(rows) or [False]),
        },
        count=lambda batch: batch["real"].sum(),
        loss_of=loss_of,
        evaluation=lambda sums: (
            {name: value / sums["count"] for name, value in sums.items() if name != "count"} | {"count": sums["count"]}
        ),
    )


def rows() -> Dataset:
    return Dataset.from_dict({"length": LENGTHS})


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 100])
def test_every_row_counts_once_whatever_the_batch_size(batch_size):
    """Σ 2l / 11 = 2 · 66 / 11 = 12; Σ (2l)² / 11 = 4 · 506 / 11 = 184."""
    values = evaluation(Scale(), rows(), objective(), limit=MicroBatchLimit(rows=batch_size), max_batches=0)
    assert values == pytest.approx({"loss": 12.0, "squares": 184.0, "count": 11.0})


def test_evaluation_runs_without_gradients_or_dropout_and_starts_with_the_longest_rows():
    model = Scale()
    evaluation(model, rows(), objective(), limit=MicroBatchLimit(rows=4), max_batches=0)
    assert model.modes == {False}
    assert model.sizes == [4, 4, 3]


def test_a_limited_evaluation_samples_batches_of_every_length():
    """Sorted in pairs: (11, 10) (9, 8) (7, 6) (5, 4) (3, 2) (1); of six batches three: the 1st, 3rd and 5th."""
    values = evaluation(Scale(), rows(), objective(), limit=MicroBatchLimit(rows=2), max_batches=3)
    assert values["count"] == 6
    assert values["loss"] == pytest.approx(2 * (11 + 10 + 7 + 6 + 3 + 2) / 6)
    assert evaluation(Scale(), rows(), objective(), limit=MicroBatchLimit(rows=2), max_batches=99)["count"] == 11


def test_an_evaluation_without_rows_has_no_metrics():
    assert evaluation(Scale(), rows().select([]), objective(), limit=MicroBatchLimit(rows=2), max_batches=0) == {}


def test_an_empty_share_becomes_a_dummy_row_with_count_0():
    batch = collated(objective(), rows(), [], torch.device("cpu"))
    assert batch["real"].tolist() == [False]
    assert collated(objective(), rows(), [2, 0], torch.device("cpu"))["values"].tolist() == [1.0, 3.0]


def test_too_few_rows_are_refused_before_a_model_is_loaded(tmp_path):
    def load(config):
        raise AssertionError("the model was loaded")

    with pytest.raises(ValueError, match="The data has 11 rows, but one step needs 12") as caught:
        fit(
            "paint", DataSplits(train=rows(), eval=rows(), report=None), objective(), load=load, tokenizer=None,
            signal_flag=signals.SignalFlag(), settings=arguments.SFTSettings(
                model=arguments.ModelArguments(per_device_train_batch_size=4, model_name_or_path="m"),
                optimizer=arguments.OptimizerArguments(gradient_accumulation_steps=3),
                run=arguments.RunArguments(output_dir=str(tmp_path)),
            ),
        )  # fmt: skip
    assert type(caught.value).__name__ == "SettingsError" and collectives.world_size() == 1


def test_a_best_metric_without_evaluation_rows_is_refused_before_a_model_is_loaded(tmp_path):
    def load(config):
        raise AssertionError("the model was loaded")

    with pytest.raises(ValueError, match="--best_metric eval_loss: .* it has none, since there are no") as caught:
        fit(
            "paint", DataSplits(train=rows(), eval=rows().select([]), report=None), objective(), load=load,
            tokenizer=None, signal_flag=signals.SignalFlag(), settings=arguments.SFTSettings(
                model=arguments.ModelArguments(per_device_train_batch_size=4, model_name_or_path="m"),
                run=arguments.RunArguments(output_dir=str(tmp_path), best_metric="eval_loss"),
            ),
        )  # fmt: skip
    assert type(caught.value).__name__ == "SettingsError"

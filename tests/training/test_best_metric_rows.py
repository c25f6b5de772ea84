"""--best_metric without evaluation rows, in the programs that load several models."""

import pytest
from programs import MAINS
from step_materials import flags, write_materials
from test_pair_settings import PHASES


@pytest.mark.parametrize("step", ["dpo", "ppo"])
def test_a_best_metric_without_evaluation_rows_is_refused_before_a_model_is_loaded(
    step, programs, tmp_path, tiny_tokenizer
):
    write_materials(tmp_path, tiny_tokenizer)
    (tmp_path / "phases.py").write_text(PHASES)
    argv = flags(step, tmp_path, tmp_path / "run", eval_fraction=0, best_metric="eval_loss")
    printed = programs.run(tmp_path / "phases.py", [MAINS[step], *argv], log=tmp_path / "log", code=2)
    assert "--best_metric eval_loss: the evaluation has no such metric; it has none, since" in printed
    assert "<data preparation>" in printed and "<model loading>" not in printed and "Traceback" not in printed

"""Curves of the report: values, axes, constant metrics, healthy ranges."""

import sys

import pytest
from repository import ROOT, SCRIPTS
from run_files import write_run

sys.path.insert(0, str(SCRIPTS))

from report_curves import CATALOGUE, GROUPS, curves_of, logarithmic, metric_of, panels_of  # noqa: E402
from report_inputs import read_run  # noqa: E402
from report_ranges import RANGES, healthy_range, recent_mean  # noqa: E402

STEP3 = "step3_rlhf_finetuning"


def run_of(tmp_path, metrics, *, name=STEP3, arguments=None, folder="run"):
    return read_run(write_run(tmp_path / folder, name=name, metrics=metrics, arguments=arguments))


def train(**columns):
    """Training lines, one per value."""
    count = len(next(iter(columns.values())))
    return [
        {"step": i + 1, "time": float(i), "phase": "train"} | {name: values[i] for name, values in columns.items()}
        for i in range(count)
    ]


def panels(*runs):
    return {panel["metric"]: panel for panel in panels_of(list(runs), [curves_of(run) for run in runs])}


def test_a_curve_has_step_seconds_and_value_of_each_phase(tmp_path):
    curves = curves_of(read_run(write_run(tmp_path / "run")))
    assert curves["train"].step == [1, 2] and curves["train"].seconds == [2.0, 4.0]
    assert curves["train"].values == {"loss": [3.0, 2.0]}  # text, booleans and nulls are no values
    assert curves["eval"].step == [2] and curves["eval"].values == {"loss": [2.5], "judge": [0.75]}


def test_a_metric_that_starts_or_pauses_later_stays_at_its_steps(tmp_path):
    rows = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0, "kl": 5.0}, {"step": 3, "kl": 6.0}]
    curves = curves_of(run_of(tmp_path, rows))["train"]
    assert curves.values == {"loss": [1.0, 2.0, None], "kl": [None, 5.0, 6.0]}
    assert curves.points("kl") == [(2, 5.0), (3, 6.0)]


def test_metrics_with_former_names_share_the_plot_of_the_new_name(tmp_path):
    old = run_of(tmp_path, [{"step": 1, "rollout_gap_mean": 0.25, "rollout_gap_max": 2.0}], folder="a")
    new = run_of(tmp_path, [{"step": 1, "rollout_logprob_mismatch_mean": 0.5, "eval_rollout_gap_max": 4.0}], folder="b")
    values = {name: [line["values"] for line in panel["lines"]] for name, panel in panels(old, new).items()}
    assert values == {"rollout_logprob_mismatch_mean": [[0.25], [0.5]], "rollout_logprob_mismatch_max": [[2.0], [4.0]]}


def test_values_of_other_types_are_not_plotted(tmp_path):
    rows = [
        {"step": [1], "loss": 1.0}, {"step": "1", "loss": 1.0}, {"step": 1, "loss": {"a": [1]}},
        {"step": 1, "loss": "1"}, {"step": 1, "phase": ["eval"], "time": {}, "loss": 10**300},
        {"step": 1, "phase": 3, "loss": True}, {"step": 2, "loss": 10**400},
    ]  # fmt: skip
    (curves,) = curves_of(run_of(tmp_path, rows)).values()
    assert (curves.step, curves.seconds, curves.values) == ([1], [None], {"loss": [1e300]})


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("perplexity", [586.0, 2.0], True), ("perplexity", [59.0, 2.0], False), ("grad_norm", [30.0, 1.0], True),
        ("grad_norm", [30.0, 0.0], False), ("value_loss", [-1.0, 100.0], False), ("critic_grad_norm", [0.1, 9.0], True),
        ("learning_rate", [1e-3, 1e-8], False), ("kl_coef", [0.001, 1.0], False), ("clip_fraction", [1e-4, 0.2], False),
        ("score", [0.01, 10.0], False), ("reward_math", [0.01, 10.0], False), ("a_new_metric", [0.01, 10.0], False),
        ("loss", [], False),
    ],
)  # fmt: skip
def test_an_axis_is_logarithmic_for_positive_magnitudes_over_a_factor_of_30(name, values, expected):
    assert logarithmic(metric_of(name), values) is expected


@pytest.mark.parametrize("name", ["learning_rate", "actor_learning_rate", "kl_coef", "router_learning_rate"])
def test_schedules_are_not_smoothed(name, tmp_path):
    drawn = panels(run_of(tmp_path, train(**{name: [1.0, 2.0]}, loss=[1.0, 2.0])))
    assert drawn[name]["smooth"] is False and drawn["loss"]["smooth"] is True


def test_a_panel_is_flat_if_every_line_is_constant(tmp_path):
    near = [1.0, 1.0 + 1e-8]
    rows = train(updates_without_signal=[0.0, 0.0], rollout_ratio=near, ratio=[1.0, 1.001], score=[0.0, 1e-9])
    drawn = panels(run_of(tmp_path, rows))
    assert {name: panel["flat"] for name, panel in drawn.items()} == {
        "updates_without_signal": True, "rollout_ratio": True, "ratio": False, "score": False,
    }  # fmt: skip
    other = run_of(tmp_path, train(rollout_ratio=[1.0, 1.01]), folder="other")
    assert not panels(run_of(tmp_path, rows, folder="again"), other)["rollout_ratio"]["flat"]


def test_a_constant_outside_its_healthy_range_is_not_hidden(tmp_path):
    drawn = panels(run_of(tmp_path, train(ended_by_eos=[0.2, 0.2], entropy=[1.0, 1.0])))
    assert not drawn["ended_by_eos"]["flat"] and "--max_answer_seq_len" in drawn["ended_by_eos"]["range"]["advice"][0]
    assert drawn["entropy"]["flat"] and drawn["entropy"]["range"]["advice"] == []


def test_advice_is_given_for_the_newest_values_only(tmp_path):
    early = [-1.0] * 2 + [0.9] * 18
    assert panels(run_of(tmp_path, train(explained_variance=early)))["explained_variance"]["range"]["advice"] == []
    late = panels(run_of(tmp_path, train(explained_variance=early[::-1]), folder="late"))["explained_variance"]
    assert len(late["range"]["advice"]) == 1 and "--critic_learning_rate" in late["range"]["advice"][0]


def test_the_recent_mean_is_that_of_the_last_tenth():
    assert recent_mean([0.0] * 18 + [1.0, 3.0]) == 2.0
    assert recent_mean([5.0]) == 5.0


def test_each_bound_has_advice_and_separates_the_values_around_it():
    for name, healthy in RANGES.items():
        assert healthy.low is not None or healthy.high is not None, name
        for bound, sign, advice in ((healthy.low, -1, healthy.below), (healthy.high, 1, healthy.above)):
            assert (bound is not None) == bool(advice), name
            if bound is not None:
                assert healthy.violation(bound) == "" and healthy.violation(bound + sign * 1e-6) == advice, name


def test_ranges_are_of_metrics_and_flags_that_exist():
    code = "\n".join(path.read_text() for path in (ROOT / "dschat").rglob("*.py"))
    assert RANGES.keys() <= CATALOGUE.keys()
    for name, healthy in RANGES.items():
        assert f'"{name}"' in code, name
        words = f"{healthy.below} {healthy.above}".replace(",", " ").replace(":", " ").split()
        for flag in {word.removeprefix("--") for word in words if word.startswith("--")}:
            assert f"{flag}: " in code, f"{name}: --{flag}"


def test_metrics_of_the_catalogue_are_logged():
    code = "\n".join(path.read_text() for folder in ("dschat", "training") for path in (ROOT / folder).rglob("*.py"))
    made = ("actor_", "critic_", "update_", "seconds_")  # prefixes that the code puts before a name
    unknown = {name for name in CATALOGUE if f'"{name}"' not in code and not name.startswith(made)
               and f"}}{name}" not in code}  # fmt: skip
    assert unknown == set()


def test_a_range_holds_where_the_settings_keep_its_meaning(tmp_path):
    ppo = run_of(tmp_path, [], arguments={"policy_loss": "ppo_clip", "top_p": 1.0, "top_k": 0})
    gspo = run_of(tmp_path, [], arguments={"policy_loss": "gspo"}, folder="gspo")
    truncated = run_of(tmp_path, [], arguments={"top_p": 0.9}, folder="top_p")
    sft = run_of(tmp_path, [], name="step1_supervised_finetuning", folder="sft")
    kto = run_of(tmp_path, [], name="step2_dpo_finetuning", folder="kto")
    assert healthy_range("clip_fraction", ppo) and not healthy_range("clip_fraction", gspo)
    assert healthy_range("rollout_ratio", ppo) and not healthy_range("rollout_ratio", truncated)
    assert healthy_range("kl", ppo) and not healthy_range("kl", kto)  # KTO logs its reference point as kl
    assert not healthy_range("accuracy", ppo) and not healthy_range("accuracy", kto)
    assert healthy_range("skipped_updates", sft) and healthy_range("skipped_updates", ppo)


def test_panels_are_in_the_order_of_their_groups(tmp_path):
    rows = train(mfu=[1, 2], grad_norm=[1, 2], score=[1, 2], reward_b=[1, 2], seconds_new=[1, 2], novel=[1, 2])
    drawn = list(panels(run_of(tmp_path, rows)).values())
    groups = [panel["group"] for panel in drawn]
    assert groups == sorted(groups, key=list(GROUPS).index)
    assert [panel["metric"] for panel in drawn] == ["score", "reward_b", "grad_norm", "novel", "mfu", "seconds_new"]

"""The page of the report in a headless Chromium: phone, controls, smoothing, refreshing, no errors."""

import json
import math
import sys
import time

import pytest
from chromium import CHROMIUM, open_tab
from repository import SCRIPTS
from run_files import sample, write_run

sys.path.insert(0, str(SCRIPTS))

import report  # noqa: E402

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, and none is installed")

STEPS = 90
WORD = "unbroken" * 20  # wider than a phone


def rlhf_lines(offset):
    """Curves with noise, a schedule, a jump over decades, a constant, and values outside a healthy range."""
    rows = []
    for i in range(1, STEPS + 1):
        noise = math.sin(12.9898 * i) / 4
        rows.append({
            "step": i, "time": 2.0 * i, "phase": "train", "score": offset + i / 50 + noise, "kl": i / 60,
            "value_loss": 50 * math.exp(-i / 10) + 0.05, "actor_learning_rate": 1e-4 * (1 if i < 45 else 0.1),
            "entropy": 0.01 + noise / 100, "padding": 0.0,
        })  # fmt: skip
        if i % 30 == 0:
            rows.append({"step": i, "time": 2.0 * i + 1, "phase": "eval", "score": offset + i / 40, "kl": i / 50})
    return rows


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of two RLHF runs of one folder name and an SFT run, with markup and wide words in their texts."""
    folder = tmp_path_factory.mktemp("report")
    for index, name in enumerate(("first", "second")):
        samples = [
            sample(step, f"prompt {p} {WORD}", f"<b>response</b> {step} <script>document.title = 'hacked'</script>",
                   score=p + step / 30, phase=phase)
            for step in (30, 60, 90) for p in range(6) for phase in ("eval", "train")
        ]  # fmt: skip
        write_run(folder / name / "ppo", metrics=rlhf_lines(index), samples=samples, arguments={
            "seed": index, "actor_model_name_or_path": f"/models/{WORD}", "kl_coef": 0.1})  # fmt: skip
    losses = [{"step": i, "time": 1.0 * i, "loss": 2.0 / i, "learning_rate": 1e-4} for i in range(1, 9)]
    write_run(folder / "sft", name="step1_supervised_finetuning", metrics=losses)
    runs = [folder / "first" / "ppo", folder / "second" / "ppo", folder / "sft"]
    assert report.main([*map(str, runs)]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with open_tab(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def tab(browser, page):
    """A new tab with the page, in a window of 1300 pixels; the page may have no errors at the end."""
    browser.renew()
    browser.resize(1300)
    browser.open(page)
    yield browser
    assert browser.errors == []


def count(tab, selector):
    return tab.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")


def click(tab, selector, text):
    """Click the first element of the selector with this text."""
    tab.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].find(e => e.textContent.trim() === "
                 f"{json.dumps(text)}).click()")  # fmt: skip


def enter(tab, key, value):
    """Set a filter of the samples."""
    element = f"document.querySelector('.sample-list [data-key={key}]')"
    events = "for (const e of ['input', 'change']) input.dispatchEvent(new Event(e));"
    tab.evaluate(f"{{ const input = {element}; input.value = {json.dumps(value)}; {events} }}")


def shown(tab):
    """The samples in the list, with their numbers."""
    return tab.evaluate("[...document.querySelectorAll('.sample-list .cards li')].map(e => e.textContent)")


def wait_until(tab, expression):
    deadline = time.monotonic() + 20
    while not tab.evaluate(expression):
        assert time.monotonic() < deadline, expression
        time.sleep(0.1)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_phone_shows_the_whole_width_of_the_page(page, tab, dark):
    tab.resize(390, 844, mobile=True, dark=dark)
    tab.open(page)
    assert tab.evaluate("innerWidth") == 390 and tab.evaluate("document.documentElement.scrollWidth") == 390
    wide = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') && !e.closest('.u-over')
        && e.getBoundingClientRect().right > 390.5).map(e => e.outerHTML.slice(0, 100))"""
    assert tab.evaluate(wide) == []
    tab.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    assert tab.evaluate(wide) == [] and tab.evaluate("document.documentElement.scrollWidth") == 390


def test_plots_follow_the_width_of_the_window(tab):
    def widths():
        size = "e => [e.clientWidth, e.firstChild.offsetWidth]"
        return tab.evaluate(f"[...document.querySelectorAll('.box')].map({size})")

    before = widths()
    assert before and all(box == chart > 200 for box, chart in before)
    tab.resize(700)
    wait_until(tab, f"document.querySelector('.box').clientWidth !== {before[0][0]}")
    wait_until(tab, "[...document.querySelectorAll('.box')].every(e => e.clientWidth === e.firstChild.offsetWidth)")


def test_text_of_runs_is_text(tab):
    assert tab.evaluate("document.title") == "RLHF → Supervised fine-tuning"
    assert count(tab, "section b:not(header b), .run b b, li script, td script") == 0
    assert "<script>document.title = 'hacked'</script>" in shown(tab)[0]


def test_scripts_other_than_the_page_own_are_refused(tab):
    tab.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title = 1\">')")
    wait_until(tab, "document.images.length === 1")
    tab.evaluate("new Promise(done => setTimeout(done, 200))")
    assert tab.evaluate("document.title") == "RLHF → Supervised fine-tuning"
    assert tab.errors and all("Content Security Policy" in error for error in tab.errors)
    tab.errors.clear()


def test_straight_lines_and_single_peaks_keep_their_place_when_smoothed(tab):
    line = [3 + 0.5 * i for i in range(50)]
    assert tab.evaluate(f"smooth({line}, 8)") == pytest.approx(line)
    peak = [0.0] * 20 + [1.0] + [0.0] * 20
    smoothed = tab.evaluate(f"smooth({peak}, 2)")
    assert smoothed == pytest.approx([0.0] * 18 + [0.2] * 5 + [0.0] * 18)  # the mean of five, on both sides alike
    assert tab.evaluate("smooth([0, 0, 0, 0, 3, 0], 2)") == pytest.approx([0, 0, 0.6, 0.6, 1.0, 0.0])
    assert tab.evaluate("smooth([1e308, 1e308, -1e308, 1e308], 1)") is not None


def test_labels_of_an_axis_have_the_decimals_of_their_distance(tab):
    assert tab.evaluate("tickLabels([0, 0.0025, 0.005])") == ["0.0000", "0.0025", "0.0050"]
    assert tab.evaluate("tickLabels([null, 20, 30])") == ["", "20", "30"]
    assert tab.evaluate("tickLabels([0, 2e5, 4e5])") == ["0", "2.0e5", "4.0e5"]


def test_noise_is_smoothed_and_schedules_are_not(tab):
    has_mean = "c => [c.card.dataset.metric, c.lines.map(line => line.mean !== null)]"
    means = f"Object.fromEntries(sections[0].charts.map({has_mean}))"
    drawn = tab.evaluate(means)
    assert drawn["score"] == [True, False, True, False]  # training and evaluation of two runs
    assert drawn["actor_learning_rate"] == [False, False]
    tab.evaluate("{ const s = document.querySelector('select[data-name=smoothing]'); s.value = 'off'; "
                 "s.dispatchEvent(new Event('change')); }")  # fmt: skip
    assert not any(any(lines) for lines in tab.evaluate(means).values())


def test_values_over_decades_have_a_logarithmic_axis_which_the_reader_can_change(tab):
    axes = "Object.fromEntries(sections[0].charts.map(c => [c.card.dataset.metric, c.chart.scales.y.distr]))"
    assert {name for name, kind in tab.evaluate(axes).items() if kind == 3} == {"value_loss"}
    click(tab, "[data-metric=value_loss] button", "log")
    assert tab.evaluate(axes)["value_loss"] == 1
    click(tab, "[data-metric=kl] button", "linear")
    assert tab.evaluate(axes)["kl"] == 3


def test_constant_metrics_are_folded_and_those_outside_their_range_have_advice(tab):
    assert tab.evaluate("document.querySelector('.constants summary').textContent") == "Constant metrics · Padding"
    assert count(tab, "[data-metric=padding]") == 0 and not tab.evaluate("document.querySelector('.constants').open")
    assert "--entropy_coef" in tab.evaluate("document.querySelector('[data-metric=entropy] .outside').textContent")
    assert count(tab, "[data-metric=kl] .range") == 1 and count(tab, "[data-metric=kl] .outside") == 0
    assert "--entropy_coef" in tab.evaluate("document.querySelector('.summary .alarms').textContent")


def test_the_healthy_range_is_drawn_in_the_plot(tab):
    """At equal places of two plots, one of them with a range, the pixels differ by the tint of the range."""
    pixel = """metric => { const c = sections[0].charts.find(c => c.card.dataset.metric === metric).chart, b = c.bbox;
        return [...c.ctx.getImageData(b.left + 3, b.top + b.height / 2 + 3, 1, 1).data].join(); }"""
    assert tab.evaluate(f"({pixel})('kl')") != "0,0,0,0" and tab.evaluate(f"({pixel})('score')") == "0,0,0,0"


def visible(tab):
    return tab.evaluate("sections[0].charts.find(c => c.card.dataset.metric === 'score').chart.series.slice(1)"
                        ".filter((s, i) => i % 2 === 0).map(s => s.show)")  # fmt: skip


def test_runs_and_phases_are_switched_off_and_on(tab):
    assert tab.evaluate("[...document.querySelectorAll('#section-0 .toggle')].map(e => e.textContent)") == [
        "first/ppo", "second/ppo", "training", "evaluation"
    ]  # fmt: skip
    assert visible(tab) == [True, True, True, True]
    click(tab, "#section-0 .toggle", "first/ppo")
    assert visible(tab) == [False, False, True, True]
    click(tab, "#section-0 .toggle", "evaluation")
    assert visible(tab) == [False, False, True, False]
    click(tab, "#section-0 .toggle", "first/ppo")
    assert visible(tab) == [True, False, True, False]


def limits(tab, section=0):
    return tab.evaluate(f"sections[{section}].charts.map(c => [c.chart.scales.x.min, c.chart.scales.x.max])")


def test_dragging_zooms_every_plot_of_the_section_and_a_double_click_shows_all(tab):
    full, other = limits(tab), limits(tab, 1)
    assert all(limit == [1, STEPS] for limit in full)
    tab.evaluate("document.querySelector('[data-metric=score]').scrollIntoView()")
    left, width, top, height = tab.evaluate(
        "{ const box = document.querySelector('[data-metric=score] .u-over').getBoundingClientRect(); "
        "[box.left, box.width, box.top, box.height]; }"
    )
    y = top + height / 2
    tab.drag(left + width / 4, left + width / 2, y)
    zoomed = limits(tab)
    assert len({tuple(limit) for limit in zoomed}) == 1 and zoomed[0] == pytest.approx([23.25, 45.5], abs=0.5)
    assert limits(tab, 1) == other
    tab.evaluate("document.querySelector('[data-metric=kl] .u-over').dispatchEvent(new MouseEvent('dblclick'))")
    assert limits(tab) == full


def test_limits_can_be_entered_and_the_axis_can_be_minutes(tab):
    tab.evaluate("{ sections[0].from.value = 10; sections[0].to.value = 20; "
                 "sections[0].to.dispatchEvent(new Event('change')); }")  # fmt: skip
    assert all(limit == [10, 20] for limit in limits(tab))
    tab.evaluate("{ const s = document.querySelector('select[data-name=\"horizontal axis\"]'); s.value = 'minutes'; "
                 "s.dispatchEvent(new Event('change')); }")  # fmt: skip
    assert limits(tab)[0] == pytest.approx([2 / 60, (2 * STEPS + 1) / 60])


def test_samples_are_filtered_by_score_step_phase_and_text(tab):
    assert len(shown(tab)) == 12  # of 36, the first page
    enter(tab, "low", "7.5")  # the scores are p + step / 30: 8 is that of prompt 5 at step 90
    assert len(shown(tab)) == 2 and all("score 8" in text for text in shown(tab))
    enter(tab, "phase", "eval")
    assert len(shown(tab)) == 1
    enter(tab, "low", "")
    enter(tab, "high", "2")
    assert sorted(text.split("score ")[1][0] for text in shown(tab)) == ["1", "2", "2"]
    enter(tab, "step", "30")
    assert len(shown(tab)) == 2
    enter(tab, "text", "PROMPT 1")
    assert len(shown(tab)) == 1 and "prompt 1" in shown(tab)[0]


def test_samples_are_ordered_and_one_prompt_is_followed_over_time(tab):
    enter(tab, "order", "best")
    assert "score 8" in shown(tab)[0]
    enter(tab, "order", "worst")
    assert "score 1" in shown(tab)[0]
    click(tab, ".sample-list .cards li button", "this prompt over time")
    assert len(shown(tab)) == 6 and all("prompt 0" in text for text in shown(tab))  # three steps, two phases
    enter(tab, "run", "1")
    assert len(shown(tab)) == 12


def test_the_theme_can_be_chosen(tab):
    background = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(background)
    for _ in range(2):  # system → light → dark
        tab.evaluate("document.getElementById('theme').click()")
    assert tab.evaluate(background) != light
    dark = tab.evaluate(background)
    tab.evaluate("document.getElementById('theme').click()")
    tab.resize(1300, dark=True)
    assert tab.evaluate(background) == dark


def test_a_watched_page_gets_new_points_and_keeps_what_the_reader_chose(tab, tmp_path):
    folder = write_run(tmp_path / "run", metrics=rlhf_lines(0), samples=[sample(1, "p", "r"), sample(2, "p", "s")])
    target = tmp_path / "page.html"
    assert report.write_report([folder], target, samples=5, refresh=1.0)
    tab.open(target)
    tab.evaluate("{ sections[0].zoom([10, 20]); document.querySelector('.constants').open = true; scrollTo(0, 333); }")
    click(tab, ".toggle", "evaluation")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 500, "time": 500.0, "phase": "train", "score": 3.0}) + "\n")
    assert report.write_report([folder], target, samples=5, refresh=1.0)
    wait_until(tab, "typeof sections === 'object' && sections.length === 1 && sections[0].extent[1] === 500")
    wait_until(tab, "document.readyState === 'complete'")
    assert limits(tab)[0] == [10, 20] and visible(tab) == [True, False]
    assert tab.evaluate("document.querySelector('.constants').open") and tab.evaluate("scrollY") == 333
    tab.evaluate("{ window.old = true; document.querySelector('#refresh input').click(); }")
    tab.evaluate("new Promise(done => setTimeout(done, 2500))")
    assert tab.evaluate("window.old") is True  # the reader has paused refreshing

"""scripts/evaluate_with_lm_eval.py: which folders it takes, and lm-eval's numbers for a local task."""

import importlib.util
import json
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from repository import SCRIPTS
from rlhf_models import save_models
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(SCRIPTS))

import evaluate_with_lm_eval as script  # noqa: E402

needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason='needs lm-eval: pip install -e ".[lm-eval]"'
)
TASK = """\
task: small_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
target_delimiter: ""
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: label
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
ROWS = [
    {"question": f"What is {i} plus 3?", "choices": [f"{i + 3}.", f"{i + 4}.", "No."], "label": i % 3} for i in range(5)
]


@pytest.fixture
def models(tmp_path):
    return save_models(tmp_path)


@pytest.fixture
def adapters(models, tmp_path):
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(models / "actor"),
        LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    model.save_pretrained(tmp_path / "adapters")
    AutoTokenizer.from_pretrained(models / "actor").save_pretrained(tmp_path / "adapters")
    return tmp_path / "adapters"


def test_options_that_are_not_its_own_go_to_lm_eval(models):
    options, others = script.parse([str(models / "actor"), "--tasks", "a", "b", "--limit", "5", "--num_fewshot", "2"])
    command = script.command_of(options, others)
    assert command[-4:] == ["--limit", "5", "--num_fewshot", "2"]
    assert command[command.index("--tasks") + 1 :][:2] == ["a", "b"] and "--apply_chat_template" in command
    plain = script.command_of(*script.parse([str(models / "actor"), "--tasks", "a", "--no_chat_template"]))
    assert "--apply_chat_template" not in plain


def test_adapters_are_evaluated_with_their_base_model_and_tokenizer(models, adapters):
    values = script.model_arguments(adapters, dtype="bfloat16")
    assert values == [
        f"pretrained={models / 'actor'}", f"peft={adapters}", f"tokenizer={adapters}", "dtype=bfloat16"
    ]  # fmt: skip


def test_folders_without_a_causal_model_are_refused(models, tmp_path, capsys):
    (tmp_path / "a,b").mkdir()
    (tmp_path / "a,b" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for folder, part in (
        (models / "reward", "is a reward model or critic"), (tmp_path, "has neither config.json nor"),
        (tmp_path / "a,b", "lm-eval splits paths at commas"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as caught:
            script.main([str(folder), "--tasks", "a"])
        assert caught.value.code == 2 and part in capsys.readouterr().err


@needs_lm_eval
@pytest.mark.parametrize("kind", ["model", "adapters"])
def test_log_likelihoods_are_those_of_the_model_after_the_chat_template(kind, models, adapters, tmp_path):
    rows, tasks = tmp_path / "sums.jsonl", tmp_path / "tasks"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tasks.mkdir()
    (tasks / "small_sums.yaml").write_text(TASK.format(path=rows))
    results = tmp_path / "results"
    folder = models / "actor" if kind == "model" else adapters  # transformers loads adapters with their base model
    status = script.main([
        str(folder), "--tasks", "small_sums", "--include_path", str(tasks), "--output_path", str(results),
        "--device", "cpu", "--log_samples",
    ])  # fmt: skip
    assert status == 0
    (file,) = results.rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    expected = [
        [choice_logprob(model, tokenizer, row["question"], choice) for choice in row["choices"]] for row in ROWS
    ]
    for sample in samples:
        actual = [float(response[0][0]) for response in sample["resps"]]
        assert actual == pytest.approx(expected[sample["doc_id"]], rel=1e-3)
    (file,) = results.rglob("results_*.json")
    correct = [max(range(3), key=e.__getitem__) == row["label"] for row, e in zip(ROWS, expected, strict=True)]
    assert json.loads(file.read_text())["results"]["small_sums"]["acc,none"] == pytest.approx(sum(correct) / len(ROWS))


@torch.no_grad()
def choice_logprob(model, tokenizer, question: str, choice: str) -> float:
    """Log-prob of the answer after the rendered question.

    lm-eval counts white space at the prompt's end, here the newline of ChatML, to the answer.
    """
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    start = len(tokenizer(prompt.rstrip(), add_special_tokens=False).input_ids)
    ids = tokenizer(prompt + choice, add_special_tokens=False, return_tensors="pt").input_ids
    logprobs = model(ids).logits[0, start - 1 : -1].double().log_softmax(-1)
    return float(logprobs.gather(1, ids[0, start:, None]).sum())

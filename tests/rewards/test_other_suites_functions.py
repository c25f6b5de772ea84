"""Reward functions written for TRL, OpenRLHF and verl get what those suites give them, or are refused."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch

from dschat.rewards.function_arguments import ARGUMENTS, binding_of
from dschat.rewards.functions import bind_options, call_reward_function
from dschat.rewards.response_batch import ResponseBatch
from dschat.rewards.retry import NoScores, RetryPolicy
from dschat.rewards.server.limits import Limits
from dschat.rewards.server.score_request import parse_score_request
from dschat.rewards.specification import column_problems, parse_reward
from dschat.rewards.weighted_sum import Rewards

ROWS = [
    {"answer": "5", "data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "5"},
     "extra_info": {"level": 1}},
    {"answer": "7", "data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "7"},
     "extra_info": {"level": 2}},
]  # fmt: skip


def batch_of(*, is_chat=False, rows=ROWS):
    return ResponseBatch(
        messages=[[{"role": "user", "content": "2 plus 3? "}], [{"role": "user", "content": "3 plus 4? "}]],
        responses=["It is 5.", "It is 8."], token_ids=[[1, 2], [3]], rows=list(rows), ended=[True, False],
        max_tokens=16, is_chat=[is_chat] * 2,
    )  # fmt: skip


ROLLOUT = SimpleNamespace(sequences=torch.zeros(2, 3, dtype=torch.long))  # of which functions read the device only


def rewards_of(path):
    policy = RetryPolicy(seconds=10, retries=0)
    return Rewards([parse_reward(f"{path}:reward")], normalize=False, retry_policy=policy)


def scores(function, batch=None):
    returned = call_reward_function(function, batch or batch_of(), source="the test")
    return asyncio.run(returned) if asyncio.iscoroutine(returned) else returned


def test_trl_functions_get_texts_for_text_prompts_and_columns_by_name():
    def correct(completions, answer, **kwargs):
        assert kwargs["prompts"] == ["2 plus 3? ", "3 plus 4? "] and kwargs["completion_ids"] == [[1, 2], [3]]
        assert kwargs["answer"] == answer if "answer" in kwargs else True
        return [1.0 if right in text else 0.0 for text, right in zip(completions, answer, strict=True)]

    assert scores(correct) == [1.0, 0.0]


def test_trl_functions_get_chat_lists_for_chat_prompts():
    def correct(prompts, completions, answer, **kwargs):
        assert prompts[0] == [{"role": "user", "content": "2 plus 3? "}]
        contents = [completion[0]["content"] for completion in completions]
        assert completions[0][0]["role"] == "assistant"
        return [float(right in text) for text, right in zip(contents, answer, strict=True)]

    assert scores(correct, batch_of(is_chat=True)) == [1.0, 0.0]


def test_the_suites_own_functions_get_texts_whatever_the_prompts_are():
    def own(prompts, responses):
        return [float(isinstance(prompt, str)) for prompt in prompts]

    assert scores(own, batch_of(is_chat=True)) == [1.0, 1.0]


@pytest.mark.parametrize("column", ["labels", "label", "answer"])
@pytest.mark.parametrize("returned", ["tensor", "dict", "list"])
def test_openrlhf_functions_get_queries_prompts_and_labels(column, returned):
    def reward_func(queries, prompts, labels):
        texts = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
        assert texts == ["It is 5.", "It is 8."]
        rewards = [float(label in text) for text, label in zip(texts, labels, strict=True)]
        tensor = torch.tensor(rewards)
        return {"tensor": tensor, "dict": {"rewards": tensor, "scores": tensor, "extra_logs": {}}, "list": rewards}[
            returned
        ]

    assert scores(reward_func, batch_of(rows=[{column: "5"}, {column: "7"}])) == [1.0, 0.0]


def test_verl_functions_are_called_for_each_response():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert data_source == "sums" and extra_info["level"] in (1, 2)
        return {"score": float(ground_truth in solution_str), "acc": 1}

    async def compute_score_later(data_source, solution_str, ground_truth, extra_info, **kwargs):
        return float(ground_truth in solution_str)

    def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
        return [float(truth in text) for text, truth in zip(solution_strs, ground_truths, strict=True)]

    assert scores(compute_score) == scores(compute_score_later) == scores(compute_scores) == [1.0, 0.0]


def test_optional_parameters_are_columns_if_the_rows_have_them():
    def function(responses, answer=None, other=None, *, factor=2.0):
        assert other is None
        return [factor * (right in text) for text, right in zip(responses, answer, strict=True)]

    assert scores(function) == [2.0, 0.0]


def test_options_are_not_set_by_columns_of_their_name():
    def function(completions, *, answer="It", **kwargs):
        return [float(answer in text) for text in completions]

    assert scores(function) == [1.0, 1.0]
    assert scores(bind_options(function, {"answer": "8"})) == [0.0, 1.0]


def refused(function) -> str:
    with pytest.raises(ValueError, match="bound by name") as caught:
        binding_of(function)
    return str(caught.value)


def test_functions_without_a_parameter_for_responses_are_refused_with_the_names_that_exist():
    assert "none of them is the responses" in refused(lambda prompts, answers: [])
    assert "positional-only" in refused(eval("lambda responses, /: []"))
    assert "none of them is the responses" in refused(lambda *args: [])
    message = refused(lambda a, b, c: [])
    assert all(name in message for name in (*ARGUMENTS, "solution_str", "columns of the data"))


@pytest.mark.parametrize("code, missing", [
    ("def f(responses, anser): return []", "anser"),
    ("def f(queries, prompts, labels): return []", "labels or label or answer"),
    ("def f(data_source, solution_str, ground_truth, extra_info): return 0", "ground_truth or reward_model or answer"),
])  # fmt: skip
def test_a_column_that_no_row_has_is_named_before_training(code, missing, tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(code)
    entry = f"{path}:f"
    (line,) = column_problems([entry], [{"solution": 1}, {"level": 2}])
    assert f"lacks: {missing}." in line and "solution, level" in line and "responses" in line
    assert column_problems([entry], [{"solution": 1}, {"anser": 1, "answer": 2}]) == []


def test_a_function_that_fails_for_every_response_of_its_first_call_ends_the_run_with_its_traceback(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("def helper(text):\n    return text['content']\n\n"
                    "def reward(completions, **kwargs):\n    return [helper(text) for text in completions]\n")
    with pytest.raises(NoScores) as caught:
        rewards_of(path).score(ROLLOUT, batch_of())
    message = str(caught.value)
    assert "failed for all of the first 2 responses" in message
    assert "return text['content']" in message and "TypeError" in message and "function_arguments" not in message


def test_other_failures_lose_only_their_own_scores(tmp_path, capsys):
    path = tmp_path / "later.py"
    path.write_text("CALLS = []\n\ndef reward(responses):\n    CALLS.append(1)\n    if len(CALLS) > 1:\n"
                    "        raise KeyError('x')\n    return [1.0, 2.0]\n")
    rewards = rewards_of(path)
    assert rewards.score(ROLLOUT, batch_of()).has_score.tolist() == [True, True]
    assert rewards.score(ROLLOUT, batch_of()).has_score.tolist() == [False, False]
    assert "returned no score for 2 of 2 responses" in capsys.readouterr().err
    path = tmp_path / "partly.py"
    code = "def reward(responses):\n    assert '8' not in ''.join(responses)\n    return [1.0 for _ in responses]\n"
    path.write_text(code)
    assert rewards_of(path).score(ROLLOUT, batch_of()).has_score.tolist() == [True, False]


def test_equal_first_scores_are_warned_of_once(tmp_path, capsys):
    path = tmp_path / "zero.py"
    path.write_text("def reward(responses):\n    return [0.0] * len(responses)\n")
    rewards = rewards_of(path)
    for _ in range(2):
        rewards.score(ROLLOUT, batch_of())
    assert capsys.readouterr().err.count("gave 0 to all of the first 2 responses") == 1
    path.with_name("other.py").write_text("def reward(responses):\n    return list(range(len(responses)))\n")
    rewards_of(path.with_name("other.py")).score(ROLLOUT, batch_of())
    assert capsys.readouterr().err == ""


def test_the_reward_server_understands_openrlhfs_requests():
    body = json.dumps({"query": ["2 plus 3? It is 5."], "prompts": ["2 plus 3? "], "labels": ["5"]}).encode()
    request = parse_score_request(body, Limits())
    assert request.messages == [[{"role": "user", "content": "2 plus 3? "}]]
    assert request.responses == ["It is 5."] and request.ended == [True]
    wrong = json.dumps({"query": ["It is 5."], "prompts": ["2 plus 3? "]}).encode()
    with pytest.raises(ValueError, match="each query beginning with its prompt"):
        parse_score_request(wrong, Limits())

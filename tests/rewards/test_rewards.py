"""Scores of a reward model, with the actor's tokenizer or its own, reward functions from files, weighted sums."""

import json
import math
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers as hf
from tiny_tokenizers import BOS_HEADERS, CHATML, make_tokenizer

from dschat.data.chat_template import decode_responses, encode_conversation, encode_prompt, ensure_chat_template
from dschat.data.micro_batches import MicroBatchLimit
from dschat.distributed.deepspeed_config import frozen_config
from dschat.distributed.engines import frozen_engine
from dschat.generation import Rollout
from dschat.models.scalar_head import TokenScores
from dschat.rewards.retry import RetryPolicy
from dschat.rewards.weighted_sum import (
    ResponseBatch,
    RewardModel,
    Rewards,
    judge_scores,
    load_function,
    parse_reward,
    same_tokenization,
)

QUESTIONS = ["What is 2 plus 3?", "Please add 17 and 4.", "a"]
MESSAGES = [[{"role": "user", "content": question}] for question in QUESTIONS]
ANSWERS = ["It is 5.", "Of course, the sum of 17 and 4 is", "21."]
ENDED = [True, False, True]


pytestmark = pytest.mark.usefixtures("single_rank_group")


def actor_tokenizer(template=CHATML):
    return make_tokenizer(eos="<|im_end|>", pad="<pad>", template=template)


def rollout_of(tokenizer, answers=ANSWERS) -> Rollout:
    """The rollout of an actor that generates these answers: encoded as for training, without the end if truncated."""
    prompts, responses = [], []
    for chat, answer, ended in zip(MESSAGES, answers, ENDED, strict=True):
        ids, _ = encode_conversation(tokenizer, [*chat, {"role": "assistant", "content": answer}])
        prompt = len(encode_prompt(tokenizer, chat))
        prompts.append(ids[:prompt])
        responses.append(ids[prompt:] if ended else ids[prompt:-1])
    left, right = max(map(len, prompts)), max(map(len, responses))
    pad = tokenizer.pad_token_id
    rows = [[pad] * (left - len(p)) + p + r + [pad] * (right - len(r)) for p, r in zip(prompts, responses, strict=True)]
    mask = [
        [False] * (left - len(p)) + [True] * (len(p) + len(r)) + [False] * (right - len(r))
        for p, r in zip(prompts, responses, strict=True)
    ]
    attention = torch.tensor(mask)
    return Rollout(torch.tensor(rows), attention, attention[:, left:], torch.zeros(3, right), torch.tensor(ENDED))


def classifier(tokenizer, kind: str = "llama", positions: int = 96) -> hf.PreTrainedModel:
    torch.manual_seed(4)
    sizes = {"vocab_size": len(tokenizer), "num_labels": 1, "pad_token_id": tokenizer.pad_token_id}
    if kind == "bert":
        config = hf.BertConfig(
            **sizes, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
            max_position_embeddings=positions, initializer_range=0.3,
        )  # fmt: skip
    elif kind == "gpt2":
        config = hf.GPT2Config(**sizes, n_embd=32, n_layer=2, n_head=2, n_positions=positions, initializer_range=0.3)
    else:
        config = hf.LlamaConfig(
            **sizes, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=positions, initializer_range=0.3,
        )  # fmt: skip
    return hf.AutoModelForSequenceClassification.from_config(config).eval()


def reward_model(model, tokenizer, actor, *, stage: int = 0) -> RewardModel:
    config = frozen_config(dtype="fp32", zero_stage=stage, micro_batch_size=3, world_size=1)
    engine = frozen_engine(TokenScores(model), config=config)
    return RewardModel(engine, tokenizer=tokenizer, actor_tokenizer=actor, limit=MicroBatchLimit(rows=8, padded=True))


@torch.no_grad()
def plain_score(model, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0, 0]


def test_with_the_actors_tokenizer_scores_are_those_of_the_unpadded_ids():
    tokenizer = actor_tokenizer()
    model, rollout = classifier(tokenizer), rollout_of(tokenizer)
    expected = [plain_score(model, row[mask].tolist()) for row, mask in
                zip(rollout.sequences, rollout.attention_mask, strict=True)]  # fmt: skip
    reward = reward_model(model, actor_tokenizer(), tokenizer)
    assert reward.reads_actor_ids
    torch.testing.assert_close(reward.score(rollout, MESSAGES), torch.stack(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("actor_template", [CHATML, None])
def test_with_another_tokenizer_scores_are_those_of_the_retokenised_conversation(kind, actor_template):
    actor = actor_tokenizer(actor_template)
    if actor_template is None:
        ensure_chat_template(actor)
    own = make_tokenizer(bos="<s>", eos="</s>", pad="<pad>", template=BOS_HEADERS)
    model, rollout = classifier(own, kind), rollout_of(actor)
    expected = []
    for chat, answer, ended in zip(MESSAGES, ANSWERS, ENDED, strict=True):
        text = own.apply_chat_template([*chat, {"role": "assistant", "content": answer}], tokenize=False)
        text = text if ended else text.removesuffix("<|im_end|>")  # a response that was cut does not end
        expected.append(plain_score(model, own(text, add_special_tokens=False).input_ids))
    reward = reward_model(model, own, actor)
    assert not reward.reads_actor_ids
    torch.testing.assert_close(reward.score(rollout, MESSAGES), torch.stack(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("kind", "limit"), [("llama", "positions"), ("gpt2", "positions"), ("bert", "tokenizer")])
def test_a_conversation_too_long_for_the_reward_model_keeps_its_bos_and_its_end(kind, limit):
    actor, own = actor_tokenizer(), make_tokenizer(bos="<s>", eos="</s>", pad="<pad>", template=BOS_HEADERS)
    longest = 13
    if limit == "tokenizer":
        own.model_max_length = longest
    model = classifier(own, kind, positions=longest if limit == "positions" else 96)
    expected = []
    for chat, answer, ended in zip(MESSAGES, ANSWERS, ENDED, strict=True):
        ids, _ = encode_conversation(own, [*chat, {"role": "assistant", "content": answer}])
        ids = ids if ended else ids[:-1]
        assert len(ids) > longest and ids[0] == own.bos_token_id
        expected.append(plain_score(model, [ids[0], *ids[-12:]]))
    reward = reward_model(model, own, actor)
    torch.testing.assert_close(reward.score(rollout_of(actor), MESSAGES), torch.stack(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_partitioned_reward_model_repeatedly_scores_as_a_whole_one_does(kind):
    actor, own = actor_tokenizer(), make_tokenizer(bos="<s>", eos="</s>", pad="<pad>", template=BOS_HEADERS)
    rollout = rollout_of(actor)
    whole = reward_model(classifier(own, kind), own, actor).score(rollout, MESSAGES)
    partitioned = reward_model(classifier(own, kind), own, actor, stage=3)
    for _ in range(3):
        torch.testing.assert_close(partitioned.score(rollout, MESSAGES), whole, atol=1e-5, rtol=1e-4)


def test_tokenizers_are_the_same_only_if_they_encode_every_conversation_alike():
    one = actor_tokenizer()
    assert same_tokenization(one, actor_tokenizer())
    other = actor_tokenizer()
    other.chat_template = BOS_HEADERS
    assert not same_tokenization(one, other)
    assert not same_tokenization(one, make_tokenizer(eos="</s>", pad="<pad>", template=CHATML))  # another end token
    assert not same_tokenization(one, make_tokenizer(bos="<s>", eos="<|im_end|>", pad="<pad>", template=CHATML))
    other = actor_tokenizer()
    other.add_tokens(["5."])
    assert not same_tokenization(one, other)
    assert same_tokenization(one, make_tokenizer(eos="<|im_end|>", pad="<s>", template=CHATML)), "padding is masked"


def test_decoding_a_response_inverts_its_encoding():
    spaced = make_tokenizer()
    ensure_chat_template(spaced)  # "Assistant:" and the space after it, which the model generates
    for tokenizer in (spaced, actor_tokenizer(), make_tokenizer(bos="<s>", template=BOS_HEADERS)):
        assert decode_responses(tokenizer, rollout_of(tokenizer).responses()) == ANSWERS
        indented = ["  x", " .", "\ny z"]  # plausible model output is kept unchanged
        assert decode_responses(tokenizer, rollout_of(tokenizer, indented).responses()) == indented


JUDGES = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Rule:  # needs its module in sys.modules
    length: int

def lengths(prompts, responses, rows):
    return [len(p) + 10 * len(r) + row["bonus"] for p, r, row in zip(prompts, responses, rows)]

def too_few(prompts, responses, rows):
    return [1.0]

def undecided(prompts, responses, rows):
    return [0.0, float("nan")]

SCORE = 3
"""


@pytest.fixture
def judges(tmp_path) -> Path:
    path = tmp_path / "judges.py"
    path.write_text(JUDGES)
    return path


def test_a_judge_is_a_function_of_prompts_responses_and_rows(judges):
    chats = [[{"role": "system", "content": "S"}, {"role": "user", "content": "ab"}], [{"role": "user", "content": ""}]]
    scores = judge_scores(load_function(f"{judges}:lengths"), chats, ["xyz", ""], [{"bonus": 100}, {"bonus": 200}])
    assert scores == [4 + 30 + 100, 0 + 0 + 200]  # "S\nab" has 4 characters


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{0}:length", "judges.py has no function length"),
        ("{0}:SCORE", "has no function SCORE"),
        ("{0}", r"has no function \(none named\)"),
        ("{0}.txt:lengths", "no Python file .*judges.py.txt"),
        ("{1}/nothing.py:lengths", "no Python file .*nothing.py"),
        ("{1}:lengths", "no Python file"),
    ],
)
def test_a_missing_judge_is_named(judges, source, message):
    with pytest.raises(ValueError, match=message + ".*FILE.py:FUNCTION"):
        load_function(source.format(judges, judges.parent))


@pytest.mark.parametrize(
    ("name", "message"), [("too_few", "1 scores for 2 responses"), ("undecided", "returned nan for the response 'b'")]
)
def test_a_judge_must_return_one_finite_number_per_response(judges, name, message):
    with pytest.raises(ValueError, match=message):
        judge_scores(load_function(f"{judges}:{name}"), MESSAGES[:2], ["a", "b"], [{}, {}])


class FlakyJudge:
    """A judge that records its calls; each of the first calls runs its behaviour, if not None."""

    def __init__(self, *behaviours):
        self.behaviours, self.calls = list(behaviours), []

    def __call__(self, prompts, responses, rows):
        self.calls.append(list(responses))
        behaviour = self.behaviours.pop(0) if self.behaviours else None
        if behaviour is not None:
            return behaviour(responses)
        if "bad" in responses:
            raise KeyError("bad")
        return [len(response) for response in responses]


def refuse(responses):
    raise RuntimeError("busy")


def scores_of(judge: FlakyJudge, responses: list[str], **settings) -> list[float | None]:
    count = len(responses)
    return RetryPolicy(**{"seconds": 5.0, "retries": 1} | settings).judge_scores(
        judge, [[{"role": "user", "content": "?"}]] * count, responses, [{}] * count
    )


def test_a_judge_that_fails_once_is_retried(capsys):
    judge = FlakyJudge(refuse)
    assert scores_of(judge, ["a", "bb"]) == [1, 2] and len(judge.calls) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("behaviour", [refuse, lambda responses: [1.0], lambda responses: [math.nan] * len(responses)])
def test_a_judge_that_keeps_failing_is_called_for_each_response_separately(behaviour, capsys):
    judge = FlakyJudge(behaviour, behaviour)
    assert scores_of(judge, ["a", "bad", "ccc"]) == [1, None, 3]
    assert judge.calls == [["a", "bad", "ccc"]] * 2 + [["a"], ["bad"], ["ccc"]]
    assert "no score for 1 of 3 responses (KeyError: 'bad')" in capsys.readouterr().err


def test_a_judge_that_hangs_costs_no_more_than_its_timeout(capsys):
    judge = FlakyJudge(*[lambda responses: threading.Event().wait(30)] * 9)
    started = time.monotonic()
    assert scores_of(judge, ["a", "b"], seconds=0.2) == [None, None]
    assert time.monotonic() - started < 5 and len(judge.calls) == 2
    assert "no score for 2 of 2 responses (TimeoutError: no result within 0.2 s)" in capsys.readouterr().err


def test_a_judge_that_times_out_on_one_response_is_not_called_for_the_others(capsys):
    judge = FlakyJudge(refuse, refuse, None, lambda responses: threading.Event().wait(30))
    assert scores_of(judge, ["a", "b", "c"], seconds=0.2) == [1, None, None]
    assert judge.calls == [["a", "b", "c"]] * 2 + [["a"], ["b"]]
    assert "no score for 2 of 3 responses (TimeoutError" in capsys.readouterr().err


REWARDS = """
def lengths(responses):
    return [len(response) for response in responses]

def short(responses):
    return [None if len(response) > 8 else 1 for response in responses]

def fussy(responses):
    if any(response.startswith("Of") for response in responses):
        raise KeyError("Of")
    return [2] * len(responses)

def column(rows):
    return [row["x"] for row in rows]
"""


@pytest.fixture
def functions(tmp_path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


def answers_of(xs=(0.0, 0.0, 0.0)) -> ResponseBatch:
    rollout = rollout_of(actor_tokenizer())
    return ResponseBatch(MESSAGES, ANSWERS, rollout.responses(), [{"x": x} for x in xs], ENDED, max_tokens=64)


def rewards_of(*entries: str, normalize: bool = False, models=None) -> Rewards:
    return Rewards([parse_reward(entry) for entry in entries], normalize=normalize, models=models,
                   retry_policy=RetryPolicy(seconds=5.0, retries=0))  # fmt: skip


def test_the_total_is_the_weighted_sum_of_sources(functions, tmp_path):
    tokenizer = actor_tokenizer()
    model, rollout = reward_model(classifier(tokenizer), tokenizer, tokenizer), rollout_of(tokenizer)
    plain = model.score(rollout, MESSAGES)
    folder = tmp_path / "reward"
    folder.mkdir()
    rewards = rewards_of(f"{folder}@2", f"{functions}:lengths@-0.5", "exact", models={str(folder): model})
    answers = answers_of()
    rows = [{"answer": "it is 5."}, {"answer": "no"}, {"answer": "21."}]
    scores = rewards.score(rollout, ResponseBatch(**vars(answers) | {"rows": rows}))
    exact = torch.tensor([1.0, 0.0, 1.0])
    lengths = torch.tensor([8.0, 33.0, 3.0])  # of ANSWERS, counted by hand
    torch.testing.assert_close(scores.total, 2 * plain - 0.5 * lengths + exact)
    assert scores.has_score.tolist() == [True] * 3 and scores.total.dtype == torch.float32
    assert list(scores.parts) == ["reward", "lengths", "exact"]
    torch.testing.assert_close(scores.parts["reward"], plain)
    assert torch.equal(scores.parts["lengths"], lengths) and torch.equal(scores.parts["exact"], exact)


def test_a_source_without_a_score_adds_nothing_and_one_that_fails_leaves_the_row_without_a_score(functions, capsys):
    scores = rewards_of(f"{functions}:short@3", f"{functions}:fussy").score(rollout_of(actor_tokenizer()), answers_of())
    # Answers of 8, 33 and 3 characters; the second begins with "Of".
    assert scores.total.tolist() == [3 + 2, 0, 3 + 2] and scores.has_score.tolist() == [True, False, True]
    assert scores.parts["fussy"].isnan().tolist() == [False, True, False]
    assert "fussy returned no score for 1 of 3 responses (KeyError: 'Of')" in capsys.readouterr().err
    scores = rewards_of(f"{functions}:short", f"{functions}:lengths").score(rollout_of(actor_tokenizer()), answers_of())
    assert scores.total.tolist() == [8 + 1, 33, 3 + 1] and scores.has_score.all()
    scores = rewards_of(f"{functions}:lengths", f"{functions}:fussy").score(rollout_of(actor_tokenizer()), answers_of())
    assert scores.total.tolist() == [8 + 2, 0, 3 + 2] and scores.has_score.tolist() == [
        True,
        False,
        True,
    ]  # a partial sum does not count
    alone = rewards_of(f"{functions}:short").score(rollout_of(actor_tokenizer()), answers_of())
    assert alone.has_score.tolist() == [True, False, True]  # no source scores the second


def test_a_column_that_no_row_has_gives_a_warning(capsys):
    scores = rewards_of("exact?column=truth").score(rollout_of(actor_tokenizer()), answers_of())
    assert not scores.has_score.any() and not scores.total.any()
    printed = capsys.readouterr().err
    assert "exact?column=truth returned no score for any of 3 responses" in printed
    assert "does the column exist? Columns of a row: x" in printed


def test_a_nan_from_a_reward_model_leaves_the_row_without_a_score():
    tokenizer = actor_tokenizer()
    model = classifier(tokenizer)
    with torch.no_grad():
        model.score.weight.fill_(torch.nan)
    rewards = rewards_of("owner/model", models={"owner/model": reward_model(model, tokenizer, tokenizer)})
    scores = rewards.score(rollout_of(tokenizer), answers_of())
    assert not scores.has_score.any() and scores.total.tolist() == [0, 0, 0]


def test_normalised_scores_are_standard_scores_over_all_rollouts_so_far(functions):
    rollout, rewards = rollout_of(actor_tokenizer()), rewards_of(f"{functions}:column@2", normalize=True)
    batches = torch.tensor([[1.0, 2.0, 6.0], [4.0, -3.0, 1000.0]], dtype=torch.float64)
    for count in (1, 2):
        seen = batches[:count].flatten()
        expected = 2 * (batches[count - 1] - seen.mean()) / seen.std(correction=0)
        scores = rewards.score(rollout, answers_of(batches[count - 1].tolist()))
        torch.testing.assert_close(scores.total.double(), expected, atol=1e-5, rtol=1e-5)
        assert scores.parts["column"].tolist() == batches[count - 1].tolist(), "parts are raw"
    state = json.loads(json.dumps(rewards.state))
    assert state == {"column": pytest.approx([6, float(seen.mean()), float(6 * seen.var(correction=0))])}
    resumed = rewards_of(f"{functions}:column@2", f"{functions}:lengths@1e-9", normalize=True)
    resumed.load_state(state)
    third = [5.0, 6.0, 9.0]
    torch.testing.assert_close(
        resumed.score(rollout, answers_of(third)).total, rewards.score(rollout, answers_of(third)).total
    )


def test_evaluation_does_not_change_the_moments(functions):
    rollout, rewards = rollout_of(actor_tokenizer()), rewards_of(f"{functions}:column", normalize=True)
    fresh = rewards.score(rollout, answers_of([1, 2, 3]), update_moments=False)
    assert fresh.total.tolist() == [1, 2, 3]  # no statistics yet: unchanged
    rewards.score(rollout, answers_of([0, 2, 4]))
    before = rewards.state
    scores = rewards.score(rollout, answers_of([2, 100, 2 + (8 / 3) ** 0.5]), update_moments=False)
    assert rewards.state == before
    assert scores.total[[0, 2]].tolist() == pytest.approx([0, 1])  # mean 2, variance 8/3
    plain = rewards.score(rollout, answers_of([2, 100, 3]), update_moments=False, normalize=False)
    assert plain.total.tolist() == [2, 100, 3], "an evaluation reports raw scores"


def test_responses_without_a_score_do_not_change_the_moments(functions):
    rollout, rewards = rollout_of(actor_tokenizer()), rewards_of(f"{functions}:short", normalize=True)
    rewards.score(rollout, answers_of())
    assert rewards.state["short"] == [2, 1, 0]  # two of three are scored, both 1
    assert rewards.score(rollout, answers_of()).total.tolist() == [0, 0, 0]


def test_sources_with_the_same_name_are_numbered(functions):
    rewards = rewards_of("length?max=4", "length?target=4", "length?max=2")
    assert list(rewards.sources) == ["length", "length_2", "length_3"]


def test_a_reward_model_that_was_not_built_is_named():
    with pytest.raises(ValueError, match="no reward model was built for owner/model"):
        rewards_of("owner/model")


def test_two_ranks_normalise_as_one_does(programs, tmp_path):
    script = Path(__file__).with_name("reward_ranks.py")
    for processes in (1, 2):
        programs.run(script, [tmp_path], processes=processes, log=tmp_path / f"log-{processes}")
    one, two = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (1, 2))
    assert one["state"]["column"] == pytest.approx(two["state"]["column"])
    assert one["totals"] == pytest.approx(two["totals"], abs=1e-6) and len(set(one["totals"])) == 6

import json
import math

import pytest

from dschat.data.records import MissingColumn, parse_record


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "q"}, [user("q")]),
        ({"prompt": [user("a"), assistant("b"), user("c")], "answer": 3}, [user("a"), assistant("b"), user("c")]),
        ({"messages": [user("a"), assistant("b")]}, [user("a")]),
        ({"messages": [user("a"), assistant("b"), user("c")]}, [user("a"), assistant("b"), user("c")]),
        ({"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}, [user("a")]),
        ({"prompt": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"}, [user("a"), assistant("b"), user("c")]),
        ({"prompt": "Human: who?"}, [user("Human: who?")]),  # not a transcript: no assistant turn
    ],
)
def test_every_schema_of_a_prompt_is_parsed(row, messages):
    assert parse_record(row, "prompt") == {"prompt": messages}


@pytest.mark.parametrize(
    ("row", "record"),
    [
        ({"messages": [user("a"), assistant("b")]}, {"messages": [user("a"), assistant("b")]}),
        ({"prompt": "a", "response": "b"}, {"messages": [user("a"), assistant("b")]}),
        ({"prompt": [user("a")], "response": assistant("b")}, {"messages": [user("a"), assistant("b")]}),
        ({"prompt": "a", "response": [user("a"), assistant("b")]}, {"messages": [user("a"), assistant("b")]}),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"messages": [user("a"), assistant("b")]}),
        ({"chosen": [user("a"), assistant("b")], "rejected": "c"}, {"messages": [user("a"), assistant("b")]}),
        ({"text": "abc"}, {"text": "abc"}),
        ({"text": "abc", "messages": None, "prompt": None}, {"text": "abc"}),  # parquet fills columns with null
    ],
)
def test_every_schema_of_an_sft_row_is_parsed(row, record):
    assert parse_record(row, "sft") == record


TURN = [user("a"), assistant("b")]
PAIR = {"prompt": [user("a")], "chosen": "b", "rejected": "c", "margin": None}


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        ({"prompt": "a", "response": "b", "label": True}, [("b", True)]),
        ({"prompt": [user("a")], "completion": [assistant("b")], "label": 0}, [("b", False)]),
        *(({"prompt": "a", "response": "b", "label": label}, [("b", label in ("1", "True", "true"))])
          for label in ("1", "True", "true", "0", "False", "false")),  # as in a csv file
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, [("b", True), ("c", False)]),
        ({"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}, [("b", True), ("c", False)]),
    ],
)
def test_every_schema_of_unpaired_responses_is_parsed(row, answers):
    assert parse_record(row, "unpaired") == {"prompt": [user("a")], "answers": answers}


def test_unpaired_rows_need_a_true_or_false_label():
    with pytest.raises(MissingColumn, match="prompt \\+ response \\+ label"):
        parse_record({"prompt": "a", "response": "b"}, "unpaired")
    for label in ("yes", 2, 0.5):
        with pytest.raises(ValueError, match="neither true"):
            parse_record({"prompt": "a", "response": "b", "label": label}, "unpaired")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": [user("a")], "chosen": assistant("b"), "rejected": [assistant("c")]},
        {"prompt": "a", "chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
        {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")], "margin": ""},
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
    ],
)
def test_all_schemas_of_a_preference_give_the_same_pair(row):
    assert parse_record(row, "preference") == PAIR


def test_equal_conversations_share_all_but_their_last_answer():
    record = parse_record({"chosen": TURN, "rejected": TURN}, "preference")
    assert record == {"prompt": [user("a")], "chosen": "b", "rejected": "b", "margin": None}


@pytest.mark.parametrize(("margin", "value"), [(0.5, 0.5), (2, 2.0), ("0.25", 0.25), (-1, -1.0)])
def test_margins_become_floats(margin, value):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin}
    assert parse_record(row, "preference")["margin"] == value


@pytest.mark.parametrize("margin", [math.nan, math.inf, "wide", True, [1]])
def test_a_margin_that_is_not_a_finite_number_is_refused(margin):
    with pytest.raises(ValueError, match="margin .* is not a finite number"):
        parse_record({"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin}, "preference")


@pytest.mark.parametrize(
    ("kind", "row", "reason"),
    [
        ("prompt", {"prompt": "  "}, "prompt is empty"),
        ("prompt", {"prompt": 7}, "string or a list of messages, not int"),
        ("prompt", {"prompt": []}, "not list"),
        ("prompt", {"prompt": [user("a"), assistant("b")]}, "ends with an assistant message"),
        ("prompt", {"prompt": [{"role": "narrator", "content": "x"}]}, "role 'narrator'"),
        ("prompt", {"prompt": [{"role": "user"}]}, r"prompt\[0\] must be"),
        ("prompt", {"prompt": [{"role": "user", "content": None}]}, "type null"),
        ("sft", {"prompt": "a", "response": ""}, "response is empty"),
        ("sft", {"messages": [user("a"), assistant("b"), user("c")]}, "last message is of role 'user'"),
        ("sft", {"messages": [assistant("b")]}, "the answer has no prompt"),
        ("sft", {"messages": [user("a"), assistant(" ")]}, r"messages\[1\] \(assistant\) is empty"),
        ("sft", {"text": " "}, "text must be"),
        ("preference", {"prompt": "x", "chosen": TURN, "rejected": "c"}, "not begin with the prompt"),
        ("preference", {"prompt": "a", "chosen": TURN[::-1], "rejected": "c"}, "exactly one assistant"),
        ("preference", {"chosen": TURN, "rejected": [user("z"), assistant("c")]}, "prompt is empty"),
    ],
)
def test_bad_rows_are_refused_with_the_reason(kind, row, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        parse_record(row, kind)
    assert not isinstance(caught.value, MissingColumn)


@pytest.mark.parametrize(
    ("kind", "row"),
    [("prompt", {"text": "a"}), ("sft", {"prompt": "a"}), ("preference", {"prompt": "a", "chosen": "b"})],
)
def test_missing_columns_are_an_error_type_of_their_own_that_names_them(kind, row):
    with pytest.raises(MissingColumn, match=f"a {kind} row needs .*; it has {', '.join(row)}"):
        parse_record(row, kind)


def test_pair_of_strings_without_prompt_lacks_a_column():
    with pytest.raises(MissingColumn, match="no prompt"):
        parse_record({"chosen": "b", "rejected": "c"}, "preference")


def test_rows_are_not_changed():
    messages = [user("a"), assistant("b")]
    parse_record({"messages": messages}, "prompt")
    assert messages == [user("a"), assistant("b")]


def test_a_system_column_is_the_first_message_unless_the_messages_begin_with_one():
    system = {"role": "system", "content": "s"}
    row = {"prompt": "a", "chosen": [user("a"), assistant("b")], "rejected": "c", "system": "s"}
    assert parse_record(row, "prompt") == {"prompt": [system, user("a")]}
    assert parse_record(row, "sft") == {"messages": [system, user("a"), assistant("b")]}
    assert parse_record(row, "preference") == PAIR | {"prompt": [system, user("a")]}
    own = {"messages": [{"role": "system", "content": "own"}, *TURN], "system": "s"}
    assert parse_record(own, "sft") == {"messages": own["messages"]}
    with pytest.raises(ValueError, match="system must be text, not int"):
        parse_record(row | {"system": 3}, "sft")


def test_messages_keep_the_fields_of_tool_calls_and_drop_others():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    answer = {"role": "tool", "content": "", "name": "f", "tool_call_id": "1"}
    messages = [user("a"), call | {"weight": 3}, answer | {"tool_calls": None}, assistant("b")]
    expected = [user("a"), call | {"content": ""}, answer, assistant("b")]
    assert parse_record({"messages": messages}, "sft") == {"messages": expected}
    with pytest.raises(ValueError, match="chosen calls tools"):
        parse_record({"prompt": "a", "chosen": [call], "rejected": "c"}, "preference")


def test_tools_are_a_list_or_its_json():
    tools = [{"type": "function", "function": {"name": "f"}}]
    for value in (tools, json.dumps(tools)):
        assert parse_record({"prompt": "a", "tools": value}, "prompt") == {"prompt": [user("a")], "tools": tools}
    assert parse_record({"prompt": "a", "tools": ""}, "prompt") == {"prompt": [user("a")]}
    for bad, reason in (("[", "not valid JSON"), ("3", "must be a list"), ([1], "must be a list")):
        with pytest.raises(ValueError, match=f"tools .*{reason}|tools is {reason}"):
            parse_record({"prompt": "a", "tools": bad}, "prompt")


def test_answers_marked_as_not_ended_are_recorded_as_cut():
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert "cut" not in parse_record(pair | {"chosen_ended": True, "rejected_ended": "true"}, "preference")
    for false in (False, 0, "false", "False"):
        assert parse_record(pair | {"rejected_ended": false}, "preference")["cut"] == [1]
        assert parse_record(pair | {"chosen_ended": false}, "unpaired")["cut"] == [0]
        assert parse_record(pair | {"chosen_ended": false, "rejected_ended": false}, "sft")["cut"] == [0]
    assert "cut" not in parse_record(pair | {"response": "d", "chosen_ended": False}, "sft"), "another answer is used"
    with pytest.raises(ValueError, match="chosen_ended 'perhaps' is neither true nor false"):
        parse_record(pair | {"chosen_ended": "perhaps"}, "preference")


@pytest.mark.parametrize("margin", [1e300, -3.5e38, "1e39", 10**400])
def test_a_margin_beyond_float32_is_a_bad_row(margin):
    """It would become infinite in the float32 column, and so would the loss."""
    with pytest.raises(ValueError, match="margin .* is (out of the range of float32|not a finite number)"):
        parse_record({"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin}, "preference")
    assert parse_record({"prompt": "a", "chosen": "b", "rejected": "c", "margin": -3.4e38}, "preference")["margin"] < 0

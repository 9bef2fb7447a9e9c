"""Tests of --data-fields on single lines: nested names, lists, indexes, and absent fields."""

import pytest

from megatron_packed.config.data_fields import DataFields, pairs_of
from megatron_packed.data.errors import BadLine
from megatron_packed.data.sources.line_fields import columns_of, field_names, first_names, has_field
from megatron_packed.data.sources.line_schema import (
    Conversation,
    PromptCompletion,
    Text,
    parse_line,
)
from support.data_helpers import refused, samples_of
from support.messages import assistant, system, user

USER, ASSISTANT = user("q"), assistant("a")
SYSTEM = system("s")


def parsed(line: dict, words: str) -> list:
    return samples_of(line, DataFields.from_pairs(pairs_of([words])))


@pytest.mark.parametrize(
    ("field", "path", "answer"),
    [
        ({"a": "x"}, "a", "x"),
        ({"a": {"b": {"c": "x"}}}, "a.b.c", "x"),
        ({"a.b": "x", "a": {"b": "y"}}, "a.b", "x"),
        ({"a": {"b.c": "x"}}, "a.b.c", "x"),
        ({"a": ["x", "y"]}, "a", "x\ny"),
        ({"a": ["x", None, "y"]}, "a", "x\ny"),
        ({"a": ["x", "y"]}, "a.1", "y"),
        ({"a": [{"b": "x"}, {"c": "z"}, {"b": ["y", "w"]}]}, "a.b", "x\ny\nw"),
        ({"a": [{"b": "x"}, {"b": "y"}]}, "a.-1.b", "y"),
        ({"a": {"0": "x"}}, "a.0", "x"),
    ],
)
def test_paths(field: dict, path: str, answer: str) -> None:
    """A dot enters an object, a number selects an element, and other lists are joined."""
    [sample] = parsed({"q": "why", **field}, f"prompt=q,completion={path}")
    assert sample == PromptCompletion("why", answer)


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"a": ""}, "empty_completion"),
        ({"a": None}, "empty_completion"),
        ({"a": []}, "empty_completion"),
        ({}, "empty_completion"),
        ({"a": [], "q": None}, "missing_key"),
        ({"a": 3}, "wrong_type"),
        ({"a": ["x", {"y": "z"}]}, "wrong_type"),
    ],
)
def test_a_line_without_a_usable_field(field: dict, reason: str) -> None:
    """A missing answer is an empty answer; a missing prompt makes the line unusable."""
    with refused(reason):
        parsed({"q": "why", **field}, "prompt=q,completion=a")


def test_every_schema_can_have_other_names() -> None:
    """Other fields of the line are not read, even if their names are those of a schema."""
    assert parsed({"body": "t", "messages": []}, "text=body") == [Text("t")]
    talk = [Conversation([SYSTEM, USER, ASSISTANT], [{"name": "f"}])]
    line = {"talk": {"turns": [USER, ASSISTANT]}, "s": "s", "t": [{"name": "f"}]}
    assert parsed(line, "messages=talk.turns,system=s,tools=t") == talk
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    for target in ("messages", "conversations"):
        [sample] = parsed({"dialog": turns, "who": "s"}, f"{target}=dialog,system=who")
        assert sample == Conversation([SYSTEM, USER, ASSISTANT], None, "sharegpt")
    line = {"ask": "q", "hint": None, "say": "a", "past": [["q", "a"]]}
    [sample] = parsed(line, "instruction=ask,input=hint,output=say,history=past")
    assert sample.messages == [USER, ASSISTANT] * 2 and sample.schema == "alpaca"


def test_contents_that_are_lists_of_parts() -> None:
    """Chat templates get one string, and the texts of the parts follow each other directly."""
    parts = [{"type": "text", "text": "a"}, "b", {"type": "output_text", "text": "c"}]
    for names in (("messages", "role", "content"), ("conversations", "from", "value")):
        field, role, content = names
        turns = [{role: "user", content: parts[:1]}, {role: "assistant", content: parts}]
        [sample] = samples_of({field: turns})
        assert [message["content"] for message in sample.messages] == ["a", "abc"]


THOUGHT = {"type": "thinking", "thinking": "t", "signature": "x"}
REASONED = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "u"}]}
ANSWERED = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("parts", "thoughts"),
    [
        ([THOUGHT, ANSWERED], "t"),
        ([THOUGHT, REASONED, {"type": "reasoning", "text": "v"}, ANSWERED], "t\n\nu\n\nv"),
        ([{"type": "thinking", "thinking": [{"type": "text", "text": "t"}]}, "a"], "t"),
        ([{"type": "reasoning", "summary": []}, ANSWERED], None),
    ],
)
def test_thoughts_at_the_start_of_an_answer_are_its_reasoning(
    parts: list, thoughts: str | None
) -> None:
    line = {"messages": [USER, assistant(parts)]}
    [sample] = samples_of(line)
    more = {} if thoughts is None else {"thinking": thoughts, "reasoning_content": thoughts}
    assert sample.messages == [USER, {**ASSISTANT, **more}]


@pytest.mark.parametrize(
    ("message", "detail"),
    [
        ({"content": [ANSWERED, THOUGHT]}, "content[1].type is 'thinking', which only begins"),
        (user([THOUGHT, ANSWERED]), "content[0].type is 'thinking', which"),
        ({"content": [THOUGHT, {"type": "image"}]}, "content[1].type is 'image'"),
        ({"content": [{"type": "thinking"}, ANSWERED]}, "content[0].thinking is a null"),
        (
            {"content": [THOUGHT, ANSWERED], "reasoning": "r"},
            "other thoughts than messages[0].reas",
        ),
        ({"content": [THOUGHT]}, "messages[0]"),
    ],
)
def test_other_thoughts_are_refused_with_their_place(message: dict, detail: str) -> None:
    """Templates print thoughts before the text, so thoughts after a text would change places."""
    with pytest.raises(BadLine) as caught:
        samples_of({"messages": [{"role": "assistant", **message}, ASSISTANT]})
    assert detail in caught.value.detail


def test_prompts_and_completions_that_are_lists_of_messages() -> None:
    """Both lists form one conversation, of which answers in the prompt are not learned."""
    line = {"ask": [USER, ASSISTANT, USER], "say": [ASSISTANT]}
    [sample] = parsed(line, "prompt=ask,completion=say")
    assert sample.messages == [USER, {**ASSISTANT, "train": False}, USER, ASSISTANT]
    [same] = samples_of({"prompt": line["ask"], "completion": line["say"]})
    assert same == sample


def test_a_text_that_completes_messages_is_an_answer() -> None:
    line = {"prompt": [USER, ASSISTANT, USER], "completion": "a", "system": "s"}
    [sample] = samples_of(line)
    assert sample == Conversation([SYSTEM, USER, {**ASSISTANT, "train": False}, USER, ASSISTANT])
    for empty in (" ", None):
        with pytest.raises(BadLine, match="empty_completion"):
            samples_of({**line, "completion": empty})


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ({"query": "q", "response": "a"}, "instruction=query,output=response"),
        ({"Input": "q", "meta": {"output": "a"}}, "instruction=Input,output=meta.output"),
        (
            {"context": "c", "question": "q", "answers": {"text": ["a"], "start": [0]}},
            "instruction=question,input=context,output=answers.text.0",
        ),
        (
            {
                "document": "d",
                "questions": [
                    {
                        "question_id": "1",
                        "question_text": "q",
                        "responses": [{"uid": "3", "response_text": "a"}],
                    }
                ],
            },
            "instruction=questions[*].question_text,input=document,"
            "output=questions[*].responses[*].response_text",
        ),
        ({"id": 1, "conversation": [USER, ASSISTANT]}, "messages=conversation"),
        ({"data": {"turns": [USER, ASSISTANT]}}, "messages=data.turns"),
        ({"page": {"body": "t"}}, "text=page.body"),
        (
            {"system_prompt": "s", "question": "q", "response": "a"},
            "instruction=question,output=response,system=system_prompt",
        ),
        (
            {"query": "q", "response": "a", "system": "s", "history": [["p", "b"]]},
            "instruction=query,output=response,system=system,history=history",
        ),
        (
            {"input": "i", "query": "q", "output": "a", "functions": [{"name": "f"}]},
            "instruction=query,input=input,output=output,tools=functions",
        ),
        (
            {"system": "", "system_prompt": "s", "question": "q", "answer": "a", "tools": {}},
            "instruction=question,output=answer,system=system_prompt",
        ),
        (
            {"question": "q", "answer": "a", "system": ""},
            "instruction=question,output=answer,system=system",
        ),
        (
            {"question": "q", "answer": "a", "system": None, "history": [USER]},
            "instruction=question,output=answer",
        ),
        (
            {"data": {"question": "q", "answer": "a", "system": "s"}},
            "instruction=data.question,output=data.answer,system=data.system",
        ),
        (
            {"conversation": [USER, ASSISTANT], "system_prompt": "s", "tools": "[]", "input": "i"},
            "messages=conversation,system=system_prompt,tools=tools",
        ),
    ],
)
def test_unknown_fields_get_a_suggestion_that_works(line: dict, fields: str) -> None:
    with pytest.raises(BadLine, match="no_known_field") as caught:
        samples_of(line)
    assert caught.value.detail.endswith(f"; perhaps --data-fields {fields}")
    assert parsed(line, fields)


@pytest.mark.parametrize(
    ("more", "fields"),
    [
        ({"response": "a"}, "prompt=prompt,completion=response"),
        ({"answer": "a", "id": 1}, "prompt=prompt,completion=answer"),
        ({"response": None}, "prompt=prompt,completion=response"),
        ({"answers": {"text": ["a"]}}, "prompt=prompt,completion=answers.text.0"),
        ({"answer": "a", "system": "s"}, "instruction=prompt,output=answer,system=system"),
        ({"answer": "a", "context": "c"}, "instruction=prompt,input=context,output=answer"),
        ({"instruction": "i", "output": "a"}, "instruction=instruction,output=output"),
        ({"prompt": [USER], "answer": "a"}, "prompt=prompt,completion=answer"),
        ({"prompt": [USER], "response": [ASSISTANT]}, "prompt=prompt,completion=response"),
    ],
)
def test_a_prompt_with_another_answer_gets_a_suggestion_that_works(more: dict, fields: str) -> None:
    line = {"prompt": "p", **more}
    with pytest.raises(BadLine, match="missing_completion") as caught:
        samples_of(line)
    assert caught.value.detail == f"fields: {', '.join(line)}; perhaps --data-fields {fields}"
    if more != {"response": None}:
        assert parsed(line, fields)


def test_a_prompt_alone_lists_its_fields() -> None:
    with pytest.raises(BadLine, match="missing_completion") as caught:
        parse_line(b'{"prompt": "p", "id": 3}')
    assert caught.value.detail == "fields: prompt, id"


def test_roles_of_sharegpt_in_messages_get_the_flag_that_reads_them() -> None:
    """The flag keeps the tools and the system text of the line."""
    turns = [{"role": "human", "content": "q"}, {"role": "gpt", "content": "a"}]
    line = {"messages": turns, "tools": [{"name": "f"}], "system": "s"}
    with pytest.raises(BadLine, match="unknown_role") as caught:
        samples_of(line)
    words = "conversations=messages,system=system,tools=tools"
    role = "messages[0].role is 'human'"
    assert caught.value.detail == f"{role}; --data-fields {words} reads such roles"
    expected = [Conversation([SYSTEM, USER, ASSISTANT], [{"name": "f"}], "sharegpt")]
    assert parsed(line, words) == expected
    with pytest.raises(BadLine, match="--data-fields conversations=talk,system=s reads such"):
        parsed({"talk": turns, "s": "s"}, "messages=talk,system=s")
    turns[0]["role"] = "bot"
    with pytest.raises(BadLine) as caught:
        samples_of(line)
    assert caught.value.detail == "messages[0].role is 'bot'"


def test_fields_without_a_usual_name_get_no_suggestion() -> None:
    """An answer without a question is not suggested as text, which would not be trained with --sft."""
    unsure = {"document": "d", "meta": {"response": "a"}}
    other_lists = {"asked": [{"question": "q"}], "said": [{"answer": "a"}], "document": "d"}
    for line in ({"x": "y"}, {}, {"conversation": "text", "id": 3}, unsure, other_lists):
        with pytest.raises(BadLine) as caught:
            samples_of(line)
        assert "perhaps" not in caught.value.detail


def test_columns_and_names_of_fields() -> None:
    fields = DataFields.from_pairs(pairs_of(["prompt=qa.question,completion=a.b"]))
    names = ["id", "qa", "a.b", "a", "input"]
    assert columns_of(fields, names, "t.parquet") == {"qa", "a.b"}
    names += ["system", "loss_mask"]  # parse_line notes that they are not read
    assert columns_of(fields, names, "t") == {"qa", "a.b", "system", "loss_mask"}
    with pytest.raises(ValueError, match=r"completion=a\.b: t has no such column; .* id, qa;"):
        columns_of(fields, ["id", "qa"], "t")
    fields = DataFields.from_pairs(pairs_of(["prompt=rows[*].qa[*].q,completion=rows[*].a"]))
    assert columns_of(fields, ["id", "rows"], "t") == {"rows"}
    assert first_names(fields) >= {"rows"} and not any("[" in name for name in first_names(fields))
    assert has_field({"rows": [{}, {"qa": [{"q": "x"}]}]}, "rows[*].qa[*].q")
    assert not has_field({"rows": [{}]}, "rows[*].qa[*].q")
    line = {"id": 1, "qa": {"q": "x", "a": ["y"]}, "turns": [user("z")]}
    assert field_names(line) == ["id", "qa.q", "qa.a", "turns.role", "turns.content"]


STORY = {
    "story": "s",
    "questions": [
        {"q": "one", "answers": [{"a": "1"}, {"a": "2"}]},
        {"q": "two", "answers": [{"a": "3"}]},
    ],
}


def test_each_element_of_a_list_makes_a_document() -> None:
    """An inner list multiplies, and a path without ``[*]`` gives the same to all documents."""
    words = "instruction=questions[*].q,input=story,output=questions[*].answers[*].a"
    asked = [[message["content"] for message in sample.messages] for sample in parsed(STORY, words)]
    assert asked == [["one\n\ns", "1"], ["one\n\ns", "2"], ["two\n\ns", "3"]]
    words = "prompt=questions[*].q,completion=questions[*].answers.a"
    assert parsed(STORY, words) == [PromptCompletion("one", "1\n2"), PromptCompletion("two", "3")]
    assert parsed({"d": {"pages": ["a", "b"]}}, "text=d.pages[*]") == [Text("a"), Text("b")]
    talks = {"talks": [{"turns": [USER, ASSISTANT]}] * 2, "s": "s"}
    assert (
        parsed(talks, "messages=talks[*].turns,system=s")
        == [Conversation([SYSTEM, USER, ASSISTANT])] * 2
    )


@pytest.mark.parametrize(
    ("questions", "reason"),
    [
        ([{"q": "one", "a": "1"}, {"q": "two"}], "empty_assistant"),
        ([{"q": "one", "a": "1"}, {"a": "2"}], "missing_key"),
        ([{"q": "one", "a": "1"}, None], "missing_key"),
        ([{"q": "one", "a": 1}], "wrong_type"),
        ([], "missing_key"),
        (None, "missing_key"),
        ({"q": "one", "a": "1"}, "wrong_type"),
    ],
)
def test_one_bad_element_makes_the_line_bad(questions: object, reason: str) -> None:
    """An empty list is no line without documents: that would be lost without a reason."""
    with refused(reason):
        parsed({"questions": questions}, "instruction=questions[*].q,output=questions[*].a")


def test_a_question_without_answers_has_an_empty_answer() -> None:
    line = {"questions": [*STORY["questions"], {"q": "three", "answers": []}]}
    with pytest.raises(BadLine, match="empty_completion"):
        parsed(line, "prompt=questions[*].q,completion=questions[*].answers[*].a")


@pytest.mark.parametrize("label", [True, 1])
def test_accepted_answers_are_learned(label: object) -> None:
    line = {"p": "q", "c": "a", "ok": label}
    assert parsed(line, "prompt=p,completion=c,label=ok") == [PromptCompletion("q", "a")]


@pytest.mark.parametrize(
    ("label", "reason"),
    [(False, "rejected_answer"), (0, "rejected_answer"), (None, "missing_key"), (2, "wrong_type")],
)
def test_other_labels_leave_the_line_out(label: object, reason: str) -> None:
    for fields in ("prompt=p,completion=c", "instruction=p,output=c", "messages=m"):
        with refused(reason):
            parsed({"p": "q", "c": "a", "m": [ASSISTANT], "ok": label}, f"{fields},label=ok")

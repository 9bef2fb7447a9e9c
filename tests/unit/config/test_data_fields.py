"""Tests of --data-fields: which targets and paths are allowed, and the cure for others."""

import pytest

from megatron_packed.config.data_fields import DataFields, fields_from, pairs_fault, pairs_of

FAULTS = {
    "": "must be TARGET=FIELD",
    "prompt": "must be TARGET=FIELD",
    "prompt=q,completion=": "must be TARGET=FIELD",
    "promt=q,completion=a": "promt is no target; did you mean prompt?",
    "question=q": "question is no target; use one of messages, ",
    "prompt=q,prompt=r,completion=a": "prompt is given twice",
    "prompt=a..b,completion=c": "a..b has an empty name beside a dot",
    "prompt=q": "prompt needs completion; add completion=FIELD",
    "output=a": "output needs instruction; add instruction=FIELD",
    "system=s": "add messages or conversations or instruction and output",
    "prompt=q,completion=a,text=t": "prompt and text belong to different schemas",
    "prompt=q,completion=a,system=s": "system does not go with prompt and completion",
    "text=t,input=i": "input does not go with text",
    "prompt=a[*].q,completion=b[*].a": "a[*].q and b[*].a take the elements of different lists",
    "prompt=a[*].b[*].q,completion=a[*].c[*].a": "take the elements of different lists",
    "prompt=a,completion=[*].b": "[*].b has [*] in a wrong place; write it after the name",
    "prompt=a,completion=b[*]c": "b[*]c has [*] in a wrong place",
    "prompt=a,completion=b[*][*]": "b[*][*] has [*] in a wrong place",
    "prompt=a[*].q,completion=a[*].a,label=a[*].ok": "leave [*] out of a[*].ok",
    "text=t,label=l": "label does not go with text",
}


@pytest.mark.parametrize("words", FAULTS)
def test_wrong_fields_are_refused_with_a_cure(words: str) -> None:
    fault = pairs_fault(pairs_of([words]))
    assert fault is not None and FAULTS[words] in "; ".join(fault)


def test_fields_of_words_and_of_a_mapping_are_equal() -> None:
    """The order of the parts does not matter, because it does not change what is read."""
    words = ["output=a.0 , instruction = q", "system=s.t"]
    assert pairs_fault(pairs_of(words)) is None
    fields = DataFields.from_pairs(pairs_of(words))
    assert fields == fields_from({"system": "s.t", "instruction": "q", "output": "a.0"})
    assert str(fields) == "system=s.t,instruction=q,output=a.0"
    assert fields.required == ("instruction", "output") and not fields.trains_text
    assert fields_from({"text": "t"}).trains_text and fields_from(None) is None


@pytest.mark.parametrize("wrong", ["prompt=q", {"prompt": 1}, {"prompt": "q"}, ["prompt"]])
def test_a_wrong_mapping_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="data_fields"):
        fields_from(wrong)


def test_lists_of_paths() -> None:
    words = ["instruction=a.b[*].q,input=c,output=a.b[*].d[*].e"]
    assert pairs_fault(pairs_of(words)) is None
    assert DataFields.from_pairs(pairs_of(words)).lists == ("a.b", "a.b[*].d")
    assert DataFields.from_pairs(pairs_of(["text=t"])).lists == ()

"""Relations between options: the problems that fields with ``needs``, ``excludes`` and bounds have."""

from __future__ import annotations

import pytest

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.options import Related, option
from megatron_packed.config.run import every_field
from megatron_packed.config.section import Section


class Sample(Section, title="sample"):
    """Options with each relation."""

    folder: str | None = option(None, "Folder.", path="output_directory")
    fast: bool = option(False, "Fast.", excludes=Related("exact", "they round differently"))
    exact: bool = option(False, "Exact.")
    every: int | None = option(
        None, "Interval.", needs=Related("folder", "it is written to"), multiple_of="step"
    )
    step: int = option(4, "Step.", minimum=1)
    part: int = option(2, "Part.", minimum=1, divides="step")
    form: str = option(
        "plain", "Form.", choices=("plain", "exact"), needs=Related("exact", cure="add --exact")
    )
    table: str | None = option(None, "Table.", required_with=Related("form", value="exact"))
    most: int = option(1, "Most.", minimum=1, at_most="step")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"every": 8}, "--every 8: needs --folder: it is written to; add --folder PATH, or leave it out."),
        (
            {"fast": True, "exact": True},
            "--fast: contradicts --exact: they round differently; leave one of the two flags out.",
        ),
        (
            {"every": 6, "folder": "a"},
            "--every 6: must be a multiple of --step (4); give 4 or 8.",
        ),
        ({"form": "exact", "table": "a"}, "--form exact: needs --exact; add --exact."),
        (
            {"form": "exact", "exact": True},
            "--table: is required with --form exact; give --table TEXT.",
        ),
        ({"most": 8}, "--most 8: must be at most --step (4); give 1 to 4, or raise --step."),
        ({"part": 3}, "--part 3: must divide --step (4); choose from 1, 2, 4."),
    ],
)  # fmt: skip
def test_a_broken_relation_is_one_problem(values: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Sample(**values)
    assert str(caught.value) == problem


def test_kept_relations_are_no_problem() -> None:
    assert Sample(every=8, folder="a", fast=True, part=4).every == 8
    assert Sample(exact=True).part == 2


def test_relations_name_options_of_their_section() -> None:
    names = {(field.section, field.name) for field in every_field()}
    for field in every_field():
        declared = field.option
        related = (declared.needs, declared.excludes, declared.required_with or ())
        several = [each if isinstance(each, tuple) else (each,) for each in related]
        others = [each.name for group in several for each in group]
        bounds = (declared.multiple_of, declared.divides, declared.at_most)
        for name in (*others, *filter(None, bounds)):
            assert (field.section, name) in names, field.key
        assert not declared.at_most or declared.minimum is not None, field.key

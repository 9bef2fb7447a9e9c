"""Table of capabilities, which ``--explain`` and ``megatron-packed doctor`` print."""

from megatron_packed.explain.capability import OFF, ON, PARTIAL, WIDTH, Capability, row, table


def test_a_row_is_the_first_case_that_holds():
    cases = (
        ("", PARTIAL, "not this one"),
        ("given", OFF, "because", "a setting"),
        (True, ON, "else"),
    )
    assert row("name", *cases) == Capability("name", OFF, "because", "a setting")
    assert row("name", cases[-1]) == Capability("name", ON, "else")


def test_the_table_has_columns_and_a_line_for_each_better_setting():
    short = Capability("scan", ON, "triton, the fastest backend")
    cured = Capability("attention", PARTIAL, "word " * 40, "pip install a package")
    lines = table([short, cured])
    assert lines[0] == "scan       on       triton, the fastest backend"
    assert lines[1].startswith("attention  partial  word word")
    assert lines[2].startswith(" " * 20 + "word")
    assert lines[-1] == " " * 20 + "-> pip install a package"
    assert max(map(len, lines)) <= WIDTH


def test_values_and_replacements_have_their_places():
    rows = [
        Capability("torch", ON, found="2.11"),
        Capability("apex", OFF, "absent", instead="torch"),
    ]
    assert table(rows) == [
        "torch  on       2.11",
        "apex   off            absent. used instead: torch",
    ]

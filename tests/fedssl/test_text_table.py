"""Tables as text, written by hand."""

from dataclasses import replace

from fedssl.text_table import TableCell, TextTable, align, escape_latex, latex, markdown, text_cell

LINES = [["strategy", "n", "knn"], ["fedavg|2", "10", "9.5"]]


def test_columns_start_or_end_at_the_same_place():
    assert align(LINES, left=1) == "strategy   n  knn\nfedavg|2  10  9.5"
    assert align([["a", "b"], ["long", ""]], left=2) == "a     b\nlong"


def test_markdown_has_a_rule_and_keeps_bars_apart():
    expected = "| strategy | n | knn |\n| --- | ---: | ---: |\n| fedavg\\|2 | 10 | 9.5 |\n"
    assert markdown(LINES, left=1) == expected


def test_a_mark_in_every_form():
    marked = {(1, 2)}
    assert align(LINES, left=1, marked=marked) == "strategy   n   knn\nfedavg|2  10  *9.5"
    assert markdown(LINES, left=1, marked=marked).endswith("| fedavg\\|2 | 10 | **9.5** |\n")
    assert latex(LINES, left=1, marked=marked) == (
        "\\begin{tabular}{lrr}\n\\toprule\nstrategy & n & knn \\\\\n\\midrule\n"
        "fedavg\\textbar{}2 & 10 & \\textbf{9.5} \\\\\n\\bottomrule\n\\end{tabular}\n"
    )


def test_latex_takes_no_word_for_a_command():
    hostile = "\\input{x} % & $ # _ ~ ^ \n[1] *"
    expected = "\\textbackslash{}input\\{x\\} \\% \\& \\$ \\# \\_ \\textasciitilde{} \\textasciicircum{}  {[}1] {*}"
    assert escape_latex(hostile) == expected
    assert escape_latex("60.0 ± 1.4") == "60.0 $\\pm$ 1.4"


def test_what_is_a_number_is_sorted_as_one():
    texts = ("0.1", "-1e-3", "l_dawa", "", "nan", "inf")
    assert [text_cell(text).value for text in texts] == [0.1, -0.001, *[None] * 4]


def test_columns_in_which_most_rows_agree_are_joined():
    header = [f"setting{number}" for number in range(11)]
    rows = [[text_cell(text) for text in (name, *["0"] * 10)] for name in ("a", "b", "c")]
    rows[1][2], rows[1][3], rows[2][3] = text_cell("7"), text_cell(""), text_cell("")
    cells = [[*row, TableCell(f"{number}.5", numbers=(f"{number}.50",))] for number, row in enumerate(rows)]
    table = TextTable("Results", [*header, "knn"], cells, left=11, csv_header=[*header, "knn"])
    assert table.text().splitlines()[:4] == [
        "setting0  other settings  knn",
        "a                         0.5",
        "b         setting2=7      1.5",
        "c                         2.5",
    ]
    assert "setting10=0" in table.markdown()
    assert table.csv().splitlines()[2] == "b,0,7,,0,0,0,0,0,0,0,1.50"  # complete
    assert replace(table, left=10).text().startswith("setting0  setting1 ")

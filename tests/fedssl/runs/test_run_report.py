import pytest

from fedssl.runs.run_report import RunReport


@pytest.mark.parametrize("report", [RunReport("/a folder/ü", None), RunReport(None, "two\nlines"), RunReport()])
def test_a_report_is_one_line_that_is_read_back(report):
    assert "\n" not in report.line()
    assert RunReport.parse(report.line()) == report


@pytest.mark.parametrize(
    "line",
    [
        "fedssl.errors.InputError: rounds=0",
        "10 clients; output in /run",
        "{",
        "{}",
        '{"run_folder": "/run"}',
        '{"run_folder": "/run", "error": 1}',
        '{"run_folder": "/run", "error": null, "more": null}',
        ' {"run_folder": "/run", "error": null}',
        '{"run_folder": "/run", "error": null} and more',
    ],
)
def test_other_lines_are_not_reports(line):
    assert RunReport.parse(line) is None

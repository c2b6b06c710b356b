import pytest

from fedssl.runs.run_report import parse_report, report_line


@pytest.mark.parametrize(("folder", "error"), [("/a folder/ü", None), (None, "two\nlines"), (None, None)])
def test_a_report_is_one_line_that_is_read_back(folder, error):
    line = report_line(run_folder=folder, error=error)
    assert "\n" not in line
    assert parse_report(line) == {"run_folder": folder, "error": error}


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
    assert parse_report(line) is None

"""Options of the commands that compute from an encoder."""

import sys

import pytest

from fedssl.augmented_views import cli as views
from fedssl.classify import cli as classify
from fedssl.config.commands import bands_of, check_output, encoder_file, flag_of, number_of, read_options, source_of
from fedssl.embedding import cli as embedding
from fedssl.errors import InputError
from fedssl.evaluation import cli as evaluation
from fedssl.explore import cli as explore
from fedssl.export import cli as export


def test_options_and_settings_of_the_data_set_are_separated():
    words = ["run=a b", "dataset.label=x, y", "hydra.searchpath=[file:///conf]", "dataset.size=8"]
    assert read_options("fedssl-embed", words, keys=("run",)) == ({"run": "a b"}, {"label": "x, y", "size": 8})


@pytest.mark.parametrize("command", [classify, embedding, evaluation, explore, export, views])
@pytest.mark.parametrize("words", [["-h"], ["run=r1", "--help"], ["--config-dir", "conf", "x", "-h", "y=1"]])
def test_any_word_may_ask_for_help(command, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fedssl-x", *words])
    assert command.main() == 0
    assert capsys.readouterr().out == f"{command.USAGE}\n"
    monkeypatch.setattr(sys, "argv", ["fedssl-x"])
    assert command.main() == 2


@pytest.mark.parametrize(
    ("command", "word", "remedy"),
    [
        *((command, "my run", "write run='my run'") for command in (classify, embedding, evaluation, explore, export)),
        *((command, "a.png", "write images=a.png") for command in (classify, embedding, explore)),
        *((command, ".", "write dataset.path=.") for command in (evaluation, export, views)),
        (views, "my run", "write dataset.path='my run'"),
        (explore, "my run/e.pt", "write encoder='my run/e.pt'"),
        (embedding, "imgs/*", "write images='imgs/*'"),
        (embedding, "x" * 300, "write images=x"),
    ],
)
def test_a_path_without_its_option_is_refused(command, word, remedy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my run").mkdir()
    for name in ("my run/config.yaml", "my run/e.pt", "a.png"):
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "argv", ["fedssl-x", word])
    assert command.main() == 2
    assert f": {word} does not have the form key=value; {remedy}" in capsys.readouterr().err


def test_a_part_of_a_value_with_spaces_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fedssl-x", "images=my", "photos"])
    assert embedding.main() == 2
    assert ": photos does not have the form key=value; quote values with spaces" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rnu=x", "rnu=x has no effect on fedssl-embed; did you mean run; allowed are run and settings"),
        ("run=", "run= has no value; write run=... or leave it out"),
        ("run", "run has no effect on fedssl-embed"),
    ],
)
def test_other_options_are_refused(word: str, message: str):
    with pytest.raises(InputError, match=message):
        read_options("fedssl-embed", [word], keys=("run",))


@pytest.mark.parametrize("options", [{}, {"run": "a", "encoder": "b"}])
def test_none_or_two_encoders_are_refused(options: dict[str, str]):
    with pytest.raises(InputError, match="give either run=DIR"):
        source_of(options)


def test_the_encoder_of_a_folder_or_file(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(InputError, match=f"^{run} does not exist; give the folder of a finished run"):
        encoder_file(run)
    run.mkdir()
    (run / "config.yaml").touch()
    with pytest.raises(InputError, match=f"^{run}/encoder.pt does not exist; finish the run with fedssl resume={run}"):
        encoder_file(run)
    (run / "encoder-1.pt").touch()
    with pytest.raises(InputError, match=f"the run has 1 encoders; give one of them: encoder={run}/encoder-1.pt"):
        encoder_file(run)
    file = run / "encoder.pt"
    file.touch()
    assert encoder_file(run) == encoder_file(file) == source_of({"encoder": str(file)}) == file
    with pytest.raises(InputError, match=f"run={file} is a file; give the folder of a finished run, or encoder={file}"):
        source_of({"run": str(file)})


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "1.5", "0", "2001"])
def test_other_numbers_are_refused(text: str):
    with pytest.raises(InputError, match="must be a whole number from 1 to 2,000, or auto"):
        number_of("limit", text, 1, 2000, further=", or auto")
    assert number_of("limit", "2000", 1, 2000) == 2000
    assert number_of("share", "0.5", 0, 1, whole=False) == 0.5


def test_flags_have_two_values():
    assert [flag_of("skip", text) for text in ("true", "True", "false")] == [True, True, False]
    with pytest.raises(InputError, match="skip=1 is not valid; choose skip=true or skip=false"):
        flag_of("skip", "1")


def test_a_folder_without_write_access_takes_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda folder, mode: folder != tmp_path)  # root may write everywhere
    with pytest.raises(InputError, match=r"out=.*page.html is in a folder that you may not write"):
        check_output("out", tmp_path / "page.html", ".html")


def test_endings_of_files_are_those_of_any_case(tmp_path):
    check_output("out", tmp_path / "page.HTML", ".html", ".htm")
    with pytest.raises(InputError, match="does not end in .html, .htm"):
        check_output("out", tmp_path / "page.pdf", ".html", ".htm")
    with pytest.raises(InputError, match="create .*none first"):
        check_output("out", tmp_path / "none" / "page.html", ".html")


def test_bands_are_counted_from_one():
    assert bands_of("4,3,2", 13) == (3, 2, 1)
    assert bands_of("[8]", 13) == (7,)


@pytest.mark.parametrize("bands", ["0,1,2", "1,2,14", "1,2", "x,1,2", "", "1,2,", "-1,2,3"])
def test_bands_that_do_not_exist_are_refused(bands: str):
    with pytest.raises(InputError, match="must be one or three channels from 1 to 13, such as bands=1,2,3"):
        bands_of(bands, 13)

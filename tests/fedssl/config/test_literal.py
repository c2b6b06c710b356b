"""Text settings with any characters: on every command line, and in the commands that a run stores."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from fedssl.config.literal import literal_values, path_of, plain_override, public_overrides, shell_command, user_path
from fedssl.config.load import compose
from fedssl.config.overrides import parse
from fedssl.errors import InputError
from fedssl.evaluation import cli as evaluation
from fedssl.export import cli as export
from fedssl.report import cli as report
from simulation import cli
from tests.devices import write_images

ODD = "Bilder ä~[1], {it's} (x)=50% #$x`\"\\;é"
TEXTS = [
    ODD,
    "a=b",
    "=",
    "[x]",
    "'",
    '"q',
    "a,b",
    "$HOME",
    "a\\",
    "True",
    "1e3",
    "0x10",
    "1_000",
    "nan",
    "x" * 5000,
    "a\tb",
]


@pytest.mark.parametrize("key", ["output_dir", "dataset.path", "+evaluation.datasets.x.path", "hydra.sweep.dir"])
def test_text_is_taken_as_it_stands(key: str):
    for text in (f"/{text}" if text == "=" else text for text in TEXTS):
        (quoted,) = literal_values([f"{key}={text}"])
        assert literal_values([quoted]) == [quoted]
        assert [override.value() for override in parse([quoted])] == [text]
        assert literal_values([plain_override(quoted)]) == [quoted]
        assert path_of(text) == Path(text)


def test_home_folders(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    no_user = "~no-such-user/a"
    for text, path in (("~/a", "/home/me/a"), ("~", "/home/me"), (no_user, no_user), ("a/~", "a/~")):
        assert user_path(text) == Path(path)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)  # a user without an entry in the system's list
    with pytest.raises(RuntimeError, match="home directory"):  # not a new folder with the name ~
        user_path("~/a")


def test_interpolations_stand_beside_any_characters(monkeypatch):
    monkeypatch.setenv("SEED", "5")
    monkeypatch.setenv("PHOTOS", "/a b, c=d")
    seed, path = "seed=${oc.decode:${oc.env:SEED}}", "dataset.path=${oc.env:PHOTOS,/x}/e, f=g"
    settings = compose(["dataset=folder", seed, path])
    assert (settings.seed, settings.data.reader.values["path"]) == (5, "/a b, c=d/e, f=g")
    assert shlex.split(shell_command(settings.recording.overrides))[2:] == [seed, path]
    for given in ([seed, path], [seed, "dataset.path=${oc.env:PHOTOS,/x},/y"]):
        once = literal_values(given, sweep=True)
        assert literal_values(once, sweep=True) == once
    assert once[1] == "dataset.path='${oc.env:PHOTOS,/x}','/y'"


def test_unquoted_commas_separate_the_values_of_a_sweep():
    given = ["dataset.path=/a ä,'/b,c',null", "resume=/a,b", "encoder.weights=choice(a,b)"]
    assert literal_values(given, sweep=True) == ["dataset.path='/a ä','/b,c',null", "resume='/a,b'", given[2]]
    assert literal_values(literal_values(given, sweep=True), sweep=True) == literal_values(given, sweep=True)


def test_a_path_with_a_comma_is_not_split_silently(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_images(tmp_path / "we,ird", 2)
    for text in ("we,ird", f"{tmp_path}/we,ird", "~/we,ird"):
        with pytest.raises(InputError, match="is one path that exists, but 2 values of a sweep; quote it as") as caught:
            literal_values(["seed=0,1", f"dataset.path={text}"], sweep=True)
        one, each = re.search("quote it as in (.*), or each value as in (.*)", str(caught.value)).groups()
        assert one == f"""'dataset.path="{text}"'"""
        assert each == f"""'dataset.path="{text[:-4]}","ird"'"""
        for quoted in (one, each):
            assert literal_values(shlex.split(quoted), sweep=True) == shlex.split(quoted)
    assert literal_values(["dataset.path=we,ird"]) == ["dataset.path='we,ird'"]
    literal_values([f"dataset.path={'x' * 5000},y", "dataset.path=we,other", "tracker.run=we,ird"], sweep=True)
    for name in ("we", "ird"):
        (tmp_path / name).mkdir()
    assert literal_values(["dataset.path=we,ird"], sweep=True) == ["dataset.path='we','ird'"]  # all of them exist


def test_a_home_folder_is_found_in_every_path_setting(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    overrides = ["output_dir='~/run'", "teacher=~/t.pt", "encoder.weights=~/w", "engine=deployment"]
    config = compose([*overrides, "engine.root_certificates=~/ca.crt", "dataset.cache=~/c"]).recording.config
    paths = (config.output_dir, config.teacher, config.encoder.weights, config.engine.root_certificates)
    assert paths == tuple(f"{tmp_path}/{name}" for name in ("run", "t.pt", "w", "ca.crt"))
    assert config.dataset.cache == f"{tmp_path}/c"
    assert report._parser().parse_args(["--into=~/figures"]).into == tmp_path / "figures"
    assert compose(["output_dir=~nobody-here/x"]).recording.config.output_dir == f"{Path.cwd()}/~nobody-here/x"


def test_commands_quote_once_and_those_for_publication_have_no_folders():
    overrides = literal_values([f"dataset.path=/home/me/{ODD}", "tracker.run='my run'", "strategy='fedavg'"])
    words = shlex.split(shell_command(overrides))
    assert words[1:] == [f"dataset.path=/home/me/{ODD}", "tracker.run=my run", "strategy=fedavg"]
    local = ["dataset.path=/home/me/pets", "dataset.cache=/home/me/c", "encoder.weights=../w/a.pt"]
    local += ["engine.address=me:1"]
    local += ["hydra.searchpath=['file:///home/me/conf']", "+dataset.extra={at: /home/me/x, n: 1}"]
    local += ["strategy=fedu/byol"]
    shown = ["dataset.path=pets", "encoder.weights='a.pt'", "hydra.searchpath=[conf]", "+dataset.extra={at:x,n:1}"]
    assert public_overrides(local) == [*shown, "strategy=fedu/byol"]
    assert public_overrides(["encoder.weights=timm:vit_small/x"]) == ["encoder.weights=timm:vit_small/x"]


@pytest.fixture
def command(monkeypatch, capsys):
    """Call a command; return its output."""

    def call(main, *arguments: object) -> str:
        monkeypatch.setattr("sys.argv", ["command", *map(str, arguments)])
        status = main()
        out, err = capsys.readouterr()
        assert status == 0, err
        return out

    return call


def test_every_command_reads_a_folder_with_any_name(command, monkeypatch, tmp_path):
    home = tmp_path / ODD
    write_images(home / "images" / "a", 8)
    write_images(home / "images" / "b", 8)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    quick = "dataset=folder dataset.size=8 num_clients=2 local_epochs=1 rounds=1 threads=1 encoder.width=4"
    quick += " partition=iid engine=local evaluate_every=0 final_evaluation=none collapse_images=0"
    command(cli.main, *quick.split(), f"dataset.path={home}/images", "dataset.cache=null", "output_dir=~/run")
    again = json.loads((home / "run" / "summary.json").read_text())["command"]
    assert f"dataset.path={home}/images" in shlex.split(again)
    command(cli.main, *shlex.split(again)[1:], f"output_dir={home}/second")
    command(cli.main, "resume=~/run", "rounds=2")
    command(evaluation.main, f"run={home}/run", f"dataset.path={home}/images")
    command(export.main, "encoder=~/run/encoder.pt", "format=huggingface", "output=~/card")
    command(export.main, f"run={home}/run", "format=huggingface", f"output={home}/both")
    card = (home / "both" / "README.md").read_text()
    assert "dataset.path=images" in card
    assert str(tmp_path) not in card
    assert {path.name for path in home.iterdir()} == {"images", "run", "second", "card", "both"}
    assert [path.name for path in tmp_path.iterdir()] == [ODD]


def test_masks_are_a_folder_or_a_column(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for masks, expected in (("folder", str(tmp_path / "folder")), ("column", "column")):
        config = compose(["final_evaluation=segmentation", f"final_evaluation.masks={masks}"]).recording.config
        assert config.final_evaluation.masks == expected

"""Files of others: what they declare is checked before memory is taken, and nothing in them is run."""

import os
import pickle
import time
import zipfile
from pathlib import Path

import pytest
import torch

from fedssl.atomic_files import atomic_write, make_subfolder, reject_symlinks, remove_partial_files, write_text
from fedssl.errors import InputError, sanitize
from fedssl.safe_io import check_tensors_like, open_regular_file, read_tensors, read_text, read_yaml
from fedssl.text_table import csv_path, escape_markdown, to_csv


def saved(path, content):
    torch.save(content, path)
    return path


def archive(path, members, *, compressed=False):
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as stream:
        for name, content in members.items():
            stream.writestr(name, content)
    return path


def with_list(tmp_path, listed):
    """An archive of torch's form with this pickle as the list of its tensors."""
    return archive(tmp_path / "x.pt", {"x/data.pkl": listed, "x/version": b"3\n", "x/byteorder": b"little"})


def test_plain_data_with_tensors_comes_back(tmp_path):
    content = {"a": torch.arange(6).view(2, 3), "b": [1, 2.5, "x", None, True], "c": {3: (torch.ones(2).half(), "y")}}
    back = read_tensors(saved(tmp_path / "x.pt", content))
    assert torch.equal(back["a"], content["a"])
    assert back["b"] == content["b"]
    assert back["c"][3][0].dtype == torch.float16


class Calls:
    """Pickled, it calls something."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("call", [(os.mkdir, "made"), (bytearray, 10**12), (torch.zeros, 10**12)])
def test_nothing_is_called(tmp_path, monkeypatch, protocol, call):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="which is not a tensor"):
        read_tensors(with_list(tmp_path, pickle.dumps({"a": Calls(*call)}, protocol)))
    assert not (tmp_path / "made").exists()


def test_lists_that_name_one_value_very_often_are_refused(tmp_path):
    value = ["x"]
    for _ in range(30):
        value = [value, value]
    with pytest.raises(ValueError, match="its values are referenced too often"):
        read_tensors(with_list(tmp_path, pickle.dumps(value, 2)))
    for _ in range(100):
        value = [value]
    with pytest.raises(ValueError, match="nested more than 32 levels"):
        read_tensors(with_list(tmp_path, pickle.dumps(value, 2)))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1).expand(10**12),
        torch.ones(2, 2).to_sparse(),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        torch.ones(2, dtype=torch.complex64),
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_other_tensors_are_refused(tmp_path, tensor):
    with pytest.raises((ValueError, RuntimeError)):
        read_tensors(saved(tmp_path / "x.pt", {"a": tensor}))


def test_a_tensor_longer_than_its_storage_takes_no_memory(tmp_path):
    path = saved(tmp_path / "x.pt", {"a": torch.zeros(1000)})
    with zipfile.ZipFile(path) as stream:
        members = {name: stream.read(name) for name in stream.namelist()}
    listed = next(name for name in members if name.endswith("data.pkl"))
    thousand, billions = b"M\xe8\x03", b"\x8a\x05\x00\x00\x00\x00\x10"  # BININT2 1000, LONG1 2^36
    assert members[listed].count(thousand) == 2  # the storage, and the tensor's shape
    members[listed] = members[listed].replace(thousand, billions)
    with pytest.raises((ValueError, RuntimeError)):
        read_tensors(archive(path, members))


def test_archives_that_are_larger_than_they_are_long_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"compressed|not an archive"):
        read_tensors(archive(tmp_path / "x.pt", {"a/data.pkl": bytes(10**6)}, compressed=True))


def test_every_byte_is_looked_at(tmp_path):
    path = saved(tmp_path / "x.pt", {"a": torch.zeros(100)})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(Exception, match=r"."):
        read_tensors(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_tensors_must_be_finite(value):
    template = {"weight": torch.ones(2)}
    check_tensors_like({"weight": torch.zeros(2)}, template)
    with pytest.raises(ValueError, match="weight has values that are not finite"):
        check_tensors_like({"weight": torch.tensor([0.0, value])}, template)


def test_only_regular_files_are_opened_and_none_is_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "zero").symlink_to("/dev/zero")
    start = time.monotonic()
    for name in ("pipe", "loop", "zero", "."):
        with pytest.raises(OSError, match=r"."):
            open_regular_file(tmp_path / name)
        with pytest.raises(InputError, match="cannot be used"):
            read_text(tmp_path / name)
    assert time.monotonic() - start < 5


def test_large_files_are_refused_by_their_size(tmp_path):
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(10 * 2**30)
    with pytest.raises(InputError, match=r"it has 10,737,418,240 bytes but the maximum is 4,194,304"):
        read_yaml(tmp_path / "large", dict)


def test_text_of_others_is_printable():
    assert sanitize("a\x1b[2J\nb\u202ec\x00\x9b") == "a [2J b c  "
    assert sanitize("a\nb", lines=True) == "a\nb"


def test_cells_are_no_formulas_links_or_cells_of_their_own():
    rows = [["=1+1", " =x", "+a", "@x", "-x", "-1.5e-3", "+2", -1.5, None, "a,b\nc", "word"]]
    assert to_csv(rows) == "'=1+1,' =x,'+a,'@x,'-x,-1.5e-3,+2,-1.5,,\"a,b c\",word\n"
    assert to_csv([["+", " -", "@", "++", "=", "-1", "\ufeff=1"]]) == "+, -,@,++,'=,-1,'\ufeff=1\n"
    assert [csv_path(path) for path in ("-1.png", "+", " @/a", "/-1")] == ["./-1.png", "./+", "./ @/a", "/-1"]
    assert escape_markdown("[x](http://y) <b> | *a* `c` ![p](q) l_dawa ~e") == (
        r"\[x\](http://y) \<b\> \| \*a\* \`c\` \!\[p\](q) l_dawa \~e"
    )


def test_cells_keep_the_spaces_of_names_and_no_control_characters():
    kept = "a\u202f\xa0\u3000\u200b\u200c\u200d\u200f\ufeffb"
    assert to_csv([[kept]]) == f"{kept}\n"
    removed = "a\x1b[2J\r\n\u2028\u2029\x85\u202e\u2066\ud800\udfff\t"
    assert to_csv([[removed]]) == f"a [2J{' ' * 10}\n"
    assert to_csv([["a\udcff"]]) == "a\\xff\n"  # a byte that is no UTF-8


def test_nothing_is_written_through_links(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    (run / "figures").symlink_to(other)
    with pytest.raises(InputError, match="figures is a symbolic link; replace it"):
        make_subfolder(run, "figures")
    with pytest.raises(InputError, match="figures is a symbolic link"):
        reject_symlinks(run)
    (other / "file").write_text("as it was")
    (run / "figures").unlink()
    (run / "file").symlink_to(other / "file")
    (run / f".file.{os.getpid()}.partial").symlink_to(other / "file")
    write_text(run / "file", "new")
    assert ((run / "file").read_text(), (other / "file").read_text()) == ("new", "as it was")
    assert [one.name for one in run.iterdir()] == ["file"]


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    kept = [tmp_path / "a.txt", tmp_path / "deep" / ".hidden"]
    for file in (*kept, tmp_path / ".a.txt.77.partial", tmp_path / "deep" / ".b.1.partial"):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    remove_partial_files(tmp_path)
    assert sorted(file for file in tmp_path.rglob("*") if file.is_file()) == kept
    running = tmp_path / f".a.txt.{os.getppid()}.partial"
    for file in (running, tmp_path / ".a.txt.99999999.partial", tmp_path / f".a.txt.{os.getpid()}.partial"):
        file.touch()
    remove_partial_files(tmp_path, of_running=False)
    assert sorted(file for file in tmp_path.rglob("*") if file.is_file()) == [running, *kept]


def test_a_file_is_synced_before_it_has_its_name(tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: steps.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    )
    atomic_write(tmp_path / "x", lambda stream: steps.append("written"))
    assert steps == ["written", str(tmp_path / f".x.{os.getpid()}.partial"), str(tmp_path)]


def test_a_file_of_another_user_is_not_called_damaged(monkeypatch, tmp_path):
    def closed(file, *arguments):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr("os.open", closed)
    with pytest.raises(
        InputError, match=r"file cannot be used \(Permission denied\); change its permissions, or choose"
    ):
        read_text(tmp_path / "file")

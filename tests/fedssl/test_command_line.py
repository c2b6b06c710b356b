"""Streams, paths and packages of the user's machine: each problem is one sentence, and none ends a run."""

import os
import subprocess
import sys

import pytest

from fedssl.command_line import check_packages
from fedssl.errors import InputError

COMMAND = "from fedssl.command_line import _main; _main('fedssl', 'program')"


def call(folder, program, *, shell="", **environment):
    """Run the function of a command in a new process, with redirections of a shell."""
    (folder / "program.py").write_text("def main():\n    " + program.replace("\n", "\n    "))
    command = f'exec "$0" -c "$1" {shell}'
    words, environment = ["sh", "-c", command, sys.executable, COMMAND], {"PYTHONUTF8": "0", **environment}
    return subprocess.run(words, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True)


@pytest.mark.heavy
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_the_null_device(tmp_path, closed):
    """A file that the command opens must not take its number, and with it what the command prints."""
    program = (
        "import sys\nwith open('file', 'w') as file:\n    print('printed', flush=True)\n    file.write('written')\n"
    )
    program += "print('error', file=sys.stderr)\nassert sys.stdin.read() == ''"
    done = call(tmp_path, program, shell=f"</dev/null {closed}")
    assert (done.returncode, done.stderr) == (0, "" if "2>" in closed else "error\n")
    assert done.stdout == ("" if " >" in f" {closed}" else "printed\n")
    assert (tmp_path / "file").read_text() == "written"


@pytest.mark.parametrize(
    ("program", "status", "sentence"),
    [
        (
            "open('x' * 300)",
            2,
            "x" * 60 + "..." + "x" * 60 + " cannot be used (File name too long); a name has at most",
        ),
        ("open('missing')", 2, "missing cannot be used (No such file or directory); correct the path"),
        ("open('program.py/x')", 2, "program.py/x cannot be used (Not a directory); a part of the path is a file"),
        (
            "raise OSError(107, 'Not connected', 'share')",
            2,
            "share cannot be used (Not connected); choose another",
        ),
        ("raise OSError(28, 'No space left on device')", 1, "No space left on device; free disk space"),
        (
            "import os\nos.mkdir('x')\nos.chdir('x')\nos.rmdir('../x')\nos.getcwd()",
            2,
            "the working folder no longer exists; change to another one with cd",
        ),
        ("raise ImportError('torch.so: failed to map segment from shared object')", 1, "out of memory; lower batch_si"),
        ("import pathlib\npathlib.Path('~nobody-here').expanduser()", 2, "this user has no home folder; set the"),
        ("bytearray(2**62)", 1, "out of memory; lower batch_size or encoder.width, or free memory"),
        (
            "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**40, -1))\nbytearray(2**62)",
            1,
            "out of memory; lower batch_size or encoder.width, or raise the limit of the shell: ulimit -v unlimited",
        ),
    ],
)
def test_a_path_that_cannot_be_used_is_one_sentence(tmp_path, program, status, sentence):
    done = call(tmp_path, program)
    assert done.returncode == status
    assert done.stderr.startswith(f"fedssl: {sentence}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("option", ["", "--version"])
def test_a_full_disk_of_standard_output_is_one_sentence(tmp_path, unbuffered, option):
    done = call(tmp_path, "print('printed')", shell=f"{option} >/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (1, "fedssl: No space left on device; free disk space\n")


@pytest.mark.parametrize("name", ["strategies.py", "simulation/__init__.py", "server_app", "client_app.py"])
def test_a_package_of_the_user_that_hides_ours(tmp_path, monkeypatch, name):
    file = tmp_path / name
    if "." in name:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    else:
        file.mkdir()
        (file / "__init__.py").touch()
    module = name.partition("/")[0].removesuffix(".py")
    check_packages()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(InputError, match=rf"{tmp_path}/{module}.* is imported as {module}, .*; rename it, or remove"):
        check_packages()


def test_a_script_with_the_name_of_a_package_is_named(tmp_path):
    (tmp_path / "simulation.py").write_text("import fedssl\nfedssl.run(num_clients=2)\n")
    done = subprocess.run([sys.executable, "simulation.py"], cwd=tmp_path, capture_output=True, text=True)
    assert f"{tmp_path}/simulation.py is imported as simulation, a package of fedssl; rename it" in done.stderr
    assert "not a package" not in done.stderr


def test_a_backend_of_a_notebook_is_not_loaded(tmp_path):
    program = "import matplotlib\nprint(matplotlib.get_backend())"
    done = call(tmp_path, program, MPLBACKEND="module://matplotlib_inline.backend_none")
    assert (done.returncode, done.stdout, done.stderr) == (0, "agg\n", "")

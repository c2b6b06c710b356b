"""The commands: entry points, signals, error messages and exit statuses."""

import codecs
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from fedssl.errors import InputError, RunError, error_of_path, sanitize

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_PACKAGES = ("client_app", "server_app", "simulation", "strategies")
_received: list[int] = []


def _main(name: str, module: str) -> None:
    """Handle signals, import the module of a command, which is slow, run it, and exit with its status."""
    prepare_streams()
    if "--version" in sys.argv[1:]:
        if status := run_command(name, partial(_print_version, name)):
            sys.exit(status)
        return
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a background job of a script
            signal.signal(number, _interrupt)
    sys.unraisablehook = _interrupt_again

    os.environ["MPLBACKEND"] = "agg"  # figures are files, and that of a notebook may not be installed here

    def command() -> int:
        Path.cwd()  # raises an error if it is gone, without which libraries cannot be loaded
        check_packages()
        main = importlib.import_module(module).main
        if _received:  # torch discards an interrupt while it imports NumPy
            raise KeyboardInterrupt
        status: int = main()
        for number in _SIGNALS:  # nothing is left to interrupt
            signal.signal(number, signal.SIG_IGN)
        return status

    status = run_command(name, command)
    if _received and "ray" in sys.modules:
        # Ray's threads, of which the signal has interrupted the start, may crash the end of the interpreter.
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


def _print_version(name: str) -> None:
    from fedssl import __version__  # here: it reads a file

    print(f"{name} {__version__}")


# The commands of ``pyproject.toml``.
fedssl = partial(_main, "fedssl", "simulation.cli")
fedssl_evaluate = partial(_main, "fedssl-evaluate", "fedssl.evaluation.cli")
fedssl_embed = partial(_main, "fedssl-embed", "fedssl.embedding.cli")
fedssl_explore = partial(_main, "fedssl-explore", "fedssl.explore.cli")
fedssl_classify = partial(_main, "fedssl-classify", "fedssl.classify.cli")
fedssl_export = partial(_main, "fedssl-export", "fedssl.export.cli")
fedssl_report = partial(_main, "fedssl-report", "fedssl.report.cli")
fedssl_runs = partial(_main, "fedssl-runs", "fedssl.runs.cli")
fedssl_watch = partial(_main, "fedssl-watch", "fedssl.watch.cli")
fedssl_views = partial(_main, "fedssl-views", "fedssl.augmented_views.cli")
fedssl_fleet = partial(_main, "fedssl-fleet", "fedssl.fleet.cli")
fedssl_device = partial(_main, "fedssl-device", "fedssl.fleet.device_cli")

# What `fedssl.run` and `fedssl.compose` call.
RUN_MODULE, SERVER_MODULE = "simulation.run", "server_app.flower_strategy"


def prepare_streams() -> None:
    """Replace closed standard streams by the null device, and characters that the encoding of a stream lacks.

    The next file that is opened would get the number of a closed stream, and all output.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - open until the process ends
    codecs.register_error("fedssl", _replace_characters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="fedssl")


def _replace_characters(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    missing = error.object[error.start : error.end].replace("±", "+-")
    return missing.encode("ascii", "backslashreplace").decode(), error.end


def check_packages() -> None:
    """Raise `InputError` if another package hides one of this project, which would be imported in its place."""
    root = Path(__file__).parents[1]
    for name in _PACKAGES:
        spec = find_spec(name)
        found = None if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), None)
        if found is None or root not in Path(found).absolute().parents:
            raise InputError(
                f"{found or 'nothing'} is imported as {name}, a package of fedssl; rename it, or remove its folder "
                "from PYTHONPATH (in a notebook: work in another folder)"
            )


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Interrupt the command at the first signal, and end the process at the second."""
    if _received:
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h")  # show the cursor, which a progress bar hides
        os._exit(128 + number)
    _received.append(number)
    raise KeyboardInterrupt


def _interrupt_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """Repeat an interrupt that Python has discarded: within a finalizer, or a callback of a fork, such as logging's."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt) and _received:
        again = threading.Timer(0.1, os.kill, (os.getpid(), _received.pop()))
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(unraisable)


def run_command(name: str, command: Callable[[], int | None]) -> int:
    """Run a command, print its error as one sentence, and return the exit status.

    The status is that of the command, or 0; 1 if it failed, 2 if the user has to correct something, 128 + the number of
    the signal that stopped it (130 for Ctrl-C). A closed pipe, as in ``fedssl-report ... | head``, is not a failure.
    """
    try:
        status = command()
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) or _received:  # an import that was interrupted may raise any error
            return _print_stop(name, str(error) if isinstance(error, KeyboardInterrupt) else "")
        if isinstance(error, OSError):
            _discard_unwritten()
        if isinstance(error, BrokenPipeError):
            return 0
        shown = shown_error(error)
        if isinstance(shown, InputError | RunError):
            return _print_error(f"{name}: {shown}", status=2 if isinstance(shown, InputError) else 1)
        raise
    return status or 0


def _discard_unwritten() -> None:
    """Discard what standard output does not take, or the end of the interpreter prints a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def shown_error(error: Exception) -> Exception | None:
    """Return the error with one sentence for what the machine lacks; others unchanged."""
    if isinstance(error, OSError):
        return error_of_path(error)
    if isinstance(error, MemoryError) or _is_unmapped(error):
        return RunError(f"out of memory; lower batch_size or encoder.width, or {_memory_remedy()}")
    if isinstance(error, RuntimeError) and str(error).startswith("Could not determine home directory"):  # by pathlib
        return InputError("this user has no home folder; set the environment variable HOME to a folder")
    return error


def _is_unmapped(error: Exception) -> bool:
    """Return whether a library could not be loaded because there is no memory for it."""
    return isinstance(error, ImportError) and "failed to map segment" in str(error)


def _memory_remedy() -> str:
    with suppress(ImportError):
        import resource  # Windows has none

        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            return "raise the limit of the shell: ulimit -v unlimited"
    return "free memory"


def _print_stop(name: str, where: str) -> int:
    number = _received[0] if _received else signal.SIGINT
    cause = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    return _print_error(f"{name}: stopped{cause}{where}", status=128 + number)


def _print_error(message: str, *, status: int) -> int:
    with suppress(OSError):  # the terminal may be closed
        print(sanitize(message), file=sys.stderr, flush=True)
    return status

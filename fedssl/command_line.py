"""Error messages and exit statuses of all commands."""

import os
import sys
from collections.abc import Callable

from fedssl.errors import InputError, RunError
from fedssl.untrusted import sanitize


def run_command(name: str, command: Callable[[], int | None]) -> int:
    """Run a command, print its error as one sentence, and return the exit status.

    Returns
    -------
    int
        Of the command, or 0; 1 if it failed, 2 if the user has to correct something, 130 after Ctrl-C. A closed pipe,
        as in ``fedssl-report ... | head``, is not a failure.
    """
    try:
        status = command()
        sys.stdout.flush()
    except InputError as error:
        return _print_error(f"{name}: {error}", status=2)
    except RunError as error:
        return _print_error(f"{name}: {error}", status=1)
    except KeyboardInterrupt as stop:
        return _print_error(f"{name}: stopped{stop}", status=130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status or 0


def _print_error(message: str, *, status: int) -> int:
    print(sanitize(message), file=sys.stderr)
    return status

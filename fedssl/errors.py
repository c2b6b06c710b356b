"""The two exceptions whose messages are written for the user."""


class InputError(ValueError):
    """Setting, file or folder that cannot be used: one sentence with what, found, allowed and what to do.

    The command line prints the sentence without a traceback and exits with status 2.
    """


class RunFailed(RuntimeError):
    """Run that could not be finished; the message is the reason.

    The command line prints it without a traceback and exits with status 1.
    """

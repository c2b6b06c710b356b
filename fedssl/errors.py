"""The exceptions whose messages are written for people."""


class InputError(ValueError):
    """Setting, file or folder that cannot be used: one sentence with what, found, allowed and what to do.

    The command line prints the sentence without a traceback and exits with status 2.
    """


class RunError(RuntimeError):
    """Run that could not be finished; the message is the reason.

    The command line prints it without a traceback and exits with status 1.
    """


class RequestRefused(InputError):
    """What a device does not do for a server: one sentence, which goes back to the server as it is.

    It is made of what the server said and of the device's limits, and has nothing else of the device in it.
    """

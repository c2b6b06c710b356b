"""Exceptions whose messages are shown to users."""


class InputError(ValueError):
    """Invalid setting, file or folder: one sentence with what, found, allowed and remedy.

    The command line prints the sentence without a traceback and exits with status 2.
    """


class RunError(RuntimeError):
    """Run that could not be completed; the message is the reason.

    The command line prints it without a traceback and exits with status 1.
    """


class RequestRefused(InputError):
    """Request of a server that a device refuses: one sentence, which is sent to the server unchanged.

    It contains values from the server's request and the device's limits, and no other data of the device.
    """

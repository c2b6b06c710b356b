"""The ClientApp: simulated clients handle their messages here, edge clients in their resident process.

Flower starts a process for every message of a SuperNode. Importing torch and loading the images would take longer than
training. Therefore this module imports neither torch nor anything that does.
"""

import logging
import os

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client_app.simulated import is_simulated
from fedssl.compat import error_reply

log = logging.getLogger("fedssl")

app = ClientApp()


@app.query("node_info")
@app.train("personalized")
@app.train("encoder")
@app.train()
def handle(message: Message, context: Context) -> Message:
    """Return the reply to a message. Any error becomes an error reply."""
    if is_simulated(context.node_config) or os.name != "posix":  # other systems lack sockets with file permissions
        from client_app import handlers  # slow import

        return handlers.handle(message, context)
    from client_app import resident_client  # POSIX only

    try:
        return resident_client.forward(message, context)
    except resident_client.ResidentProcessError as error:
        log.error("%s", error, exc_info=error.__cause__)
        return error_reply(message, str(error))
    except Exception as error:  # the server needs a reply for any failure
        log.error("the message could not be handled", exc_info=error)
        return error_reply(message, f"{type(error).__name__}; see the log of the device")

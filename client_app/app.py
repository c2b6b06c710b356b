"""The ClientApp: simulated clients handle their messages here, edge clients in their resident process.

Flower starts a process for every message of a SuperNode. Importing torch and loading the images would take longer than
training. Therefore this module imports neither torch nor anything that does. The code comes from the server and its
dependencies from the device, which may lack some: they are checked before they are imported.
"""

import os
from pathlib import Path

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from client_app.simulated import is_simulated
from fedssl.logs import log
from fedssl.wire.device import unmet_requirements

APP = Path(__file__).resolve().parents[1]  # the app that Flower installed
FAILED = 2  # Flower's code for an error of a ClientApp

app = ClientApp()


@app.query("node_info")
@app.query("statistics")
@app.train("personalized")
@app.train("encoder")
@app.train()
def handle(message: Message, context: Context) -> Message:
    """Return the reply to a message. Any error becomes an error reply."""
    simulated = is_simulated(context.node_config)
    unmet = "" if simulated else unmet_requirements(APP)
    if unmet:
        reason = (
            f"the device cannot run the server's code: {unmet}; upgrade its environment, or the server if that is older"
        )
        log.error("%s", reason)
        return Message(Error(code=FAILED, reason=reason), reply_to=message)
    if simulated or os.name != "posix":  # other systems lack sockets with file permissions
        from client_app import handlers  # slow import

        return handlers.handle(message, context)
    from client_app import resident_client  # POSIX only
    from fedssl.flower_internals import error_reply

    try:
        return resident_client.forward(message, context)
    except resident_client.ResidentProcessError as error:
        log.error("%s", error, exc_info=error.__cause__)
        return error_reply(message, str(error))
    except Exception as error:  # the server needs a reply for any failure
        log.error("the message could not be handled", exc_info=error)
        return error_reply(message, f"{type(error).__name__}; see the log of the device")

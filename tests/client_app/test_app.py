"""The ClientApp on a device whose environment lacks dependencies of the server's code."""

import subprocess
import sys

from tests.flower import ROOT

# The packages that no message needs before the requirements are checked cannot be imported.
PROGRAM = """
import sys
from pathlib import Path
for name in ("torch", "hydra", "xxhash", "safetensors", "scipy", "omegaconf", "client_app.resident_client"):
    sys.modules[name] = None
from flwr.app import Context, Message, RecordDict
from client_app import app as app_module
from flwr.supercore.task_identity import TaskIdentity
TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
app_module.APP = Path(sys.argv[1])
message = Message(RecordDict(), 2, sys.argv[2])
message.metadata.__dict__["_message_id"] = "1"
context = Context(run_id=1, node_id=2, node_config={"data-path": "x"}, state=RecordDict(), run_config={})
reply = app_module.app(message, context)
print(reply.error.code, reply.error.reason)
"""


def reply(app, kind):
    command = [sys.executable, "-c", PROGRAM, str(app), kind]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)


def test_a_device_that_lacks_a_dependency_replies_with_one_sentence(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nversion = "9.1"\nrequires-python = ">=3.11"\ndependencies = ["flwr>=1", "new-package>=3"]\n'
    )
    for kind in ("query.node_info", "train", "train.encoder"):
        run = reply(tmp_path, kind)
        sentence = (
            "the device cannot run the server's code: fedssl 9.1 needs new-package>=3 (installed: none); "
            "upgrade its environment, or the server if that is older"
        )
        assert run.stdout == f"2 {sentence}\n"
        assert "Traceback" not in run.stderr
        assert sentence in run.stderr  # the log of the device

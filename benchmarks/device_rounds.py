"""Seconds of a round with SuperNodes on this machine, for three forms of the ClientApp.

    uv run python benchmarks/device_rounds.py --nodes 5 --rounds 6

Flower starts a process for every message. ``empty`` returns the received model without importing torch, ``process``
trains in this process, and ``resident`` in the resident process of the device, as fedssl does. Every form is an app of
its own with the same ServerApp, on a private SuperLink with private SuperNodes on loopback, without TLS, with Flower's
polling intervals. Prints the median seconds of the rounds after the first, of training in them, and their difference,
and the memory of idle resident processes. Target: at most 1.3 times the overhead of ``empty``.
"""

import json
import os
import shutil
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.common import make_parser
from tests import flower
from tests.devices import write_images

TARGET = 1.3
MARK = f"FEDSSL_BENCHMARK={os.getpid()}"  # in the environment of this benchmark's processes
IMAGES = 64  # of a device
EMPTY = """
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query("node_info")
def node_info(message, context):
    info = ConfigRecord({"name": context.node_config["client-name"]})
    return Message(RecordDict({"node-info": info}), reply_to=message)

@app.train()
def train(message, context):
    content = message.content
    plan = content.config_records["config"]
    reply = ConfigRecord({name: plan[name] for name in ("round", "code-fingerprint")} | {"state-rounds": [0, 0]})
    metrics = MetricRecord({"num-examples": 1, "train-loss": 0.0, "seconds": 0.0})
    records = {"arrays": content["arrays"], "method-upload": ArrayRecord(), "metrics": metrics, "reply-config": reply}
    return Message(RecordDict(records), reply_to=message)
"""
PROCESS = """
from flwr.clientapp import ClientApp
from client_app.handlers import handle

app = ClientApp()
for register in (app.query("node_info"), app.train()):
    register(lambda message, context: handle(message, context))
"""
FORMS = {"empty": EMPTY, "process": PROCESS, "resident": None}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--strategy", default="l_dawa")
    arguments = parser.parse_args()
    os.environ.update([MARK.split("=")])
    flower.ENVIRONMENT.pop("FLWR_SUPEREXEC_TASK_POLL_INTERVAL")  # which makes tests faster
    base = None
    for form in arguments.forms:
        rounds, training, memory = measure(
            form, nodes=arguments.nodes, rounds=arguments.rounds, strategy=arguments.strategy
        )
        overhead = statistics.median(rounds[1:]) - training
        base = base or overhead
        spread = f"{min(rounds[1:]):.1f} to {max(rounds[1:]):.1f}; first {rounds[0]:.1f}"
        missed = "*" if overhead > TARGET * base else ""
        print(
            f"{form:10}{statistics.median(rounds[1:]):6.1f} s per round ({spread}), training {training:.1f} s, "
            f"overhead {overhead:.1f} s   {overhead / base:.2f}{missed}",
            flush=True,
        )
        for name, (rss, pss) in memory.items():
            print(f"{name:10}{rss:6.0f} MB RSS {pss:6.0f} MB PSS of a process", flush=True)


def measure(
    form: str, *, nodes: int, rounds: int, strategy: str
) -> tuple[list[float], float, dict[str, tuple[float, float]]]:
    """Return seconds of every round, the median of the slowest client's training, and memory by kind of process."""
    with tempfile.TemporaryDirectory() as name, sampled_memory() as memory:
        folder = Path(name)
        app = flower.copy_app(folder / "app")
        if (program := FORMS[form]) is not None:
            (app / "client_app" / "app.py").write_text(program)
        devices = []
        for number in range(nodes):
            images = write_images(folder / "images" / str(number), IMAGES, seed=number, size=32)
            node = {"data-path": images, "state-path": folder / "states" / str(number), "client-name": f"d{number}"}
            devices.append(" ".join(f'{key}="{value}"' for key, value in node.items()) + " threads=1")
        overrides = f"dataset.size=32 dataset.channels=1 dataset.mean=[0.5] dataset.std=[0.5] rounds={rounds} "
        overrides += f"strategy={strategy} "
        overrides += "local_epochs=1 evaluation=none final_evaluation=none collapse_images=0 measure_resources=false"
        config = f"dataset='folder' num-clients={nodes} output-dir='{folder / 'run'}' overrides='{overrides}'"
        outcome = flower.flwr_run(app, "--run-config", config, devices=devices)
        assert outcome.status == "finished:completed", outcome.log
        rows = read_lines(folder / "run" / "metrics.jsonl")
        clients = read_lines(folder / "run" / "clients.jsonl")
        assert len(clients) == nodes * rounds, outcome.log
        shutil.rmtree(app)
    slowest = [max(row["seconds"] for row in clients if row["round"] == number) for number in range(2, rounds + 1)]
    return [row["seconds"] for row in rows], statistics.median(slowest), memory


def read_lines(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@contextmanager
def sampled_memory() -> Iterator[dict[str, tuple[float, float]]]:
    """Yield a dictionary, which contains the median memory of the last samples at the end of the block."""
    result: dict[str, tuple[float, float]] = {}
    last: dict[int, tuple[float, float]] = {}
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(1.0):
            for entry in Path("/proc").glob("[0-9]*"):
                with suppress(OSError, KeyError, ValueError):
                    marked = MARK.encode() in (entry / "environ").read_bytes().split(b"\0")
                    if marked and b"client_app.resident_process" in (entry / "cmdline").read_bytes():
                        lines = (entry / "smaps_rollup").read_text().splitlines()[1:]
                        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
                        last[int(entry.name)] = (kilobytes["Rss"] / 1024, kilobytes["Pss"] / 1024)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield result
    finally:
        stop.set()
        thread.join()
        if last:
            rss, pss = zip(*last.values(), strict=True)
            result["resident"] = (statistics.median(rss), statistics.median(pss))


if __name__ == "__main__":
    main()

"""`fedssl.run`, `fedssl.load` and `fedssl.compose`: results, errors, and what they leave in the process."""

import asyncio
import contextlib
import importlib
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import hydra.version
import numpy as np
import pytest
import torch
from flwr.serverapp import ServerApp
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from PIL import Image

import fedssl
from fedssl.machine.process import enable_dynamo_import
from fedssl.runs.jsonl import read_jsonl
from fedssl.wire.records import record_to_arrays
from server_app.callbacks.lines import Progress
from tests.devices import write_images
from tests.federation import TINY, Federation

QUICK = ["num_clients=2", "dataset.limit=60", "encoder.width=2", "threads=1", "partition=iid", "collapse_images=0"]
QUICK += ["evaluate_every=0", "measure_resources=false", "engine=local", "local_epochs=0", "final_evaluation=none"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> fedssl.Run:
    settings = {"dataset__test_limit": 60, "output_dir": tmp_path_factory.mktemp("api") / "run, 'a' = $b"}
    return fedssl.run(*QUICK, rounds=np.int64(2), evaluate_every=1, final_evaluation="knn", **settings)


def process() -> dict[str, object]:
    loggers = [logging.root, *(logging.getLogger(name) for name in ("fedssl", "flwr", "hydra", "PIL"))]
    return {
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "arguments": list(sys.argv),
        "import path": list(sys.path),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "warnings": list(warnings.filters),
        "loggers": [(each.handlers[:], each.level, each.propagate, each.disabled) for each in loggers],
        "hydra": GlobalHydra.instance().hydra,
        "version": hydra.version.getbase(),
        "resolvers": OmegaConf.has_resolver("hydra"),
        "threads": torch.get_num_threads(),
        "running": threading.enumerate(),
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic),
        "matmul": torch.get_float32_matmul_precision(),
        "gradients": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "compiler": [name for name, of in vars(torch.optim.Optimizer).items() if "__dynamo_disable" in marks(of)],
    }


def marks(function: object) -> dict[str, object]:
    return vars(function.__wrapped__) if hasattr(function, "__wrapped__") else {}


@contextlib.contextmanager
def nothing_left():
    enable_dynamo_import()  # which a run of another test, in this process, has disabled
    before = process()
    yield
    assert process() == before


def test_a_run_returns_its_results(run):
    lines = read_jsonl(run.path / "metrics.jsonl")
    assert run.metrics.index.tolist() == [1, 2]
    assert run.metrics["evaluation.knn"].tolist() == [line["evaluation"]["knn"] for line in lines]
    assert run.metrics["model_cosine"].tolist() == [line["model_cosine"] for line in lines]
    assert run.metrics["loss"].dtype == float  # without losses, too
    assert run.metrics["dropped"].tolist() == [0, 0]
    assert run.clients[["round", "client"]].to_numpy().tolist() == [[1, 0], [1, 1], [2, 0], [2, 1]]
    assert run.summary["status"] == "finished"
    assert run.results.loc["knn", "federated"] == run.summary["final"]["federated"]["knn"]
    assert set(run.results) == {"federated", "untrained", "pixels"}
    assert f"{run.path}: finished, 2 of 2 rounds, knn" in repr(run)


def test_figures_are_displayed_in_notebooks(run):
    assert list(run.plot()) == ["partition", "metrics", "cosines"]
    (name, figure), *others = run.plot("metrics").items()
    assert (name, others) == ("metrics", [])
    assert len(figure.axes) == 1
    assert run.plot("metrics")._repr_html_().startswith('<img alt="metrics" src="data:image/png;base64,')
    for name, reason in (("metric", "no figure 'metric'; choose from partition, metr"), ("tsne", "no data for the")):
        with pytest.raises(fedssl.InputError, match=reason):
            run.plot(name)


def test_the_encoder_embeds_arrays_and_files(run, tmp_path):
    assert not run.encoder.training
    images = np.random.default_rng(0).integers(256, size=(3, 1, 8, 8), dtype=np.uint8)
    with torch.no_grad():
        expected = run.encoder(run.encoder.preprocess(torch.from_numpy(images))).numpy()
    assert np.allclose(run.embed(images), expected, atol=1e-5)
    for number, image in enumerate(images):
        Image.fromarray(image[0]).save(tmp_path / f"{number}.png")
    embeddings = run.embed(tmp_path)
    assert embeddings.names == ["0.png", "1.png", "2.png"]
    assert np.allclose(embeddings.features, expected, atol=1e-5)
    for given, reason in ((tmp_path / "nowhere", "nowhere"), ([tmp_path / "0.png"], "are a list, but embed takes a")):
        with pytest.raises(fedssl.InputError, match=reason):
            run.embed(given)


def test_several_encoders_are_named(run, tmp_path):
    several = shutil.copytree(run.path, tmp_path / "run")
    (several / "encoder.pt").rename(several / "encoder-even.pt")
    for use in (lambda run: run.encoder, lambda run: run.embed(tmp_path)):
        with pytest.raises(fedssl.InputError, match="has 1 encoders; load one of them with fedssl") as error:
            use(fedssl.load(several))
        eval(str(error.value).partition("with ")[2])
    even, digits = several / "encoder-even.pt", {"dataset": "digits", "dataset__limit": 50}
    results = fedssl.load(several).evaluate(encoder=even, **digits)
    assert fedssl.load(several).evaluate(f"encoder={even}", **digits) == {"knn": results["knn"]}


def test_evaluations_return_what_they_store(run):
    with nothing_left():
        results = run.evaluate("evaluation.k=5", evaluation="knn", dataset__limit=50)
    assert results.keys() == {"knn"}
    assert (run.path / "evaluation" / "knn-digits.json").exists()
    with pytest.raises(fedssl.InputError, match="evaluation=nn does not exist; did you mean knn"):
        run.evaluate(evaluation="nn")


def test_changed_images_are_evaluated(run, tmp_path):
    for name in "ab":
        write_images(tmp_path / name, 8)
    for files in (["knn-folder.json"], ["knn-folder-2.json", "knn-folder.json"]):
        run.evaluate(evaluation="knn", dataset="folder", dataset__channels=1, path=tmp_path)
        assert sorted(file.name for file in (run.path / "evaluation").glob("knn-folder*")) == files
        (tmp_path / "a" / "00.png").unlink(missing_ok=True)


def test_a_run_is_loaded_from_its_folder(run, tmp_path):
    loaded = fedssl.load(str(run.path))
    assert loaded.metrics.equals(run.metrics)
    assert loaded.results.equals(run.results)
    with pytest.raises(fedssl.InputError, match="nowhere does not exist; give the folder of a run"):
        fedssl.load(tmp_path / "nowhere")
    with pytest.raises(fedssl.InputError, match=r"is not a run folder; it has 1 runs, such as .*\$b"):
        fedssl.load(run.path.parent)
    unfinished = shutil.copytree(run.path, tmp_path / "run")
    (unfinished / "summary.json").unlink()
    assert (fedssl.load(unfinished).summary, fedssl.load(unfinished).results.empty) == ({}, True)


def test_a_run_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")  # the run sets 0
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with hydra.initialize(None, version_base="1.2"), nothing_left():
            fedssl.run(*QUICK, rounds=1, threads=threads, config_dir=[tmp_path])
    finally:
        torch.set_num_threads(threads)
    (folder,) = tmp_path.glob("runs/*")
    assert (folder / "encoder.pt").exists()


@pytest.mark.parametrize("settings", [{"strategy": "fedav"}, {"path": "nowhere", "dataset": "folder"}], ids=str)
def test_a_rejected_run_leaves_nothing_behind(tmp_path, monkeypatch, settings):
    monkeypatch.chdir(tmp_path)
    with nothing_left(), pytest.raises(fedssl.InputError, match=r"fedav does not|nowhere"):
        fedssl.run(**settings)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be_used_are_one_sentence(run, monkeypatch):
    monkeypatch.chdir("/proc")  # nothing can be written there
    with nothing_left(), pytest.raises(fedssl.InputError, match=r"/proc/runs/.* cannot be created .*; set output_dir"):
        fedssl.run(*QUICK)
    with pytest.raises(fedssl.InputError, match="contains a run already; choose another folder, or continue that run"):
        fedssl.run(*QUICK, output_dir=run.path)  # a cell that is run again


def test_a_run_on_another_machine_names_the_remedy(monkeypatch):
    monkeypatch.setattr("simulation.run.run_settings", lambda settings, overrides: None)
    with pytest.raises(fedssl.RunError, match="on another machine, see above; copy it from there, and open it with"):
        fedssl.run(*QUICK)


def test_an_early_interrupt_leaves_no_folder(tmp_path, monkeypatch):
    def interrupt(*_):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("server_app.app.TrainingLoop.run", interrupt)
    monkeypatch.chdir(tmp_path)
    with nothing_left(), pytest.raises(KeyboardInterrupt) as stop:
        fedssl.run(*QUICK)
    assert str(stop.value) == ""
    assert not list(tmp_path.glob("runs/*/checkpoints/*"))


def test_a_failed_run_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(Progress, "on_round_end", fail)
    with nothing_left(), pytest.raises(fedssl.RunError, match="out of memory; lower batch_size"):
        fedssl.run(*QUICK, output_dir=tmp_path / "run")


def test_an_interrupted_run_continues_as_its_message_says(tmp_path, monkeypatch):
    def interrupt(self, end):
        if end.line["round"] == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "on_round_end", interrupt)
        with nothing_left(), pytest.raises(KeyboardInterrupt) as stop:
            fedssl.run(*QUICK, rounds=3, output_dir=tmp_path / "a, b")
    advice, _, call = str(stop.value).partition("; continue with ")
    assert advice == "after round 1"  # the line of a round comes before its checkpoint
    run = eval(call)
    assert run.metrics.index.tolist() == [1, 2, 3]
    assert run.summary["status"] == "finished"


def test_runs_of_several_threads_follow_each_other(tmp_path):
    found = {}

    def start(name):
        found[name] = fedssl.run(*QUICK, rounds=1, strategy=name, output_dir=tmp_path / name)

    threads = [threading.Thread(target=start, args=[name]) for name in ("fedavg", "l_dawa")]
    with nothing_left():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(f"strategy={name}" in run.summary["overrides"] for name, run in found.items())
    assert len(found) == 2


def test_a_run_starts_inside_an_event_loop(tmp_path):
    async def cell():
        return fedssl.run(*QUICK, rounds=1, output_dir=tmp_path / "run")

    assert asyncio.run(cell()).summary["status"] == "finished"


def test_composed_settings_run_in_another_server_app(tmp_path):
    ours, theirs = Federation(tmp_path / "a", "strategy=eua"), Federation(tmp_path / "b", "strategy=eua")
    ours.run(2)
    composed = fedssl.compose(*TINY, strategy="eua", rounds=2, output_dir=tmp_path / "c")
    assert composed.settings.algorithm.strategy.values["_target_"] == "strategies.eua.EUA"
    app = ServerApp()

    @app.main()
    def main(grid, context):
        server = composed.server(grid)
        result = server.strategy.start(
            grid=grid, initial_arrays=server.initial_arrays, num_rounds=server.num_rounds, timeout=60
        )
        layers = record_to_arrays(result.arrays)
        assert all(np.array_equal(layers[name], array) for name, array in ours.layers.items())
        context.done = True

    context = type("Context", (), {})()
    app(grid=theirs.grid, context=context)
    assert context.done


SCRIPT = """
import sys, threading
import fedssl
before = set(sys.modules)
run = fedssl.run("engine=ray", *sys.argv[1:], rounds=1)
print(run.metrics["clients"].tolist(), threading.active_count())
"""


@pytest.mark.heavy
def test_a_script_needs_no_main_guard(tmp_path):
    """Ray's processes do not run the script again."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", *QUICK[:-3], "output_dir=a b"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.endswith("[2] 1\n"), done.stdout + done.stderr
    assert done.stdout.count("round 1/1") == 1


LIGHT = """
import sys
import fedssl
assert not {"torch", "numpy", "hydra", "pandas", "flwr", "ray"} & set(sys.modules)
fedssl.run
assert not {"torch", "pandas", "flwr", "ray", "matplotlib"} & set(sys.modules)
try:
    fedssl.run(strategy="fedav")
except fedssl.InputError:
    assert not {"torch", "flwr", "ray"} & set(sys.modules)
"""


def test_the_import_is_light_and_errors_are_fast():
    assert subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True).stderr == ""


TYPED = """
import numpy as np
import fedssl
run = fedssl.run("rounds=1", strategy="fedavg", partition__alpha=0.1, seed=np.int64(1), partition={"alpha": 1})
reveal_type(run)
reveal_type(run.embed(np.zeros(3)))
reveal_type(run.embed("photos"))
fedssl.run(rounds=object())
fedssl.run(1)
"""


@pytest.mark.heavy
def test_types_are_seen_by_programs(tmp_path):
    (tmp_path / "program.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent", "program.py"]
    command += ["--ignore-missing-imports", "--python-version=3.11"]
    lines = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout.splitlines()
    assert [line.partition(": ")[2] for line in lines if "program.py:5" in line] == [
        'note: Revealed type is "fedssl.api.Run"'
    ]
    assert "Embeddings" in lines[2]
    assert [line.split(":")[1] for line in lines if " error: " in line] == ["8", "9"]


@pytest.mark.parametrize("package", ["fedssl", "fedssl.evaluation"])
def test_public_names_have_types(package):
    module = importlib.import_module(package)
    stub = Path(module.__file__).with_suffix(".pyi").read_text()
    assert sorted(re.findall(r" as (\w+)$", stub, flags=re.M)) == module.__all__ == dir(module)
    assert (Path(fedssl.__file__).parent / "py.typed").exists()

"""A round that is evaluated while the next one runs: the same numbers, on record in order, whatever ends the run."""

import threading
from dataclasses import replace

import pytest

from fedssl.config.load import compose
from fedssl.errors import InputError, RunError
from server_app.build import build_components
from server_app.callbacks import order
from server_app.callbacks.lines import Lines
from server_app.checkpoint import latest_checkpoint
from server_app.evaluator import Evaluator
from server_app.training_loop import TrainingLoop
from simulation.grid import run_local, simulated_clients
from simulation.run import run
from tests.runs import ending, model_bits, read_lines

TINY = ["num_clients=2", "rounds=3", "local_epochs=1", "dataset.limit=40", "dataset.test_limit=20", "encoder.width=4"]
TINY += ["threads=1", "evaluate_every=1", "final_evaluation=knn", "batch_size=16", "engine=local"]
TINY += ["measure_resources=false", "collapse_images=16"]
STAGES = ["encoder=vit_tiny", "encoder.depth=2", "encoder.width=12", "encoder.patch=4"]
STAGES += ["schedule=layer_wise", "augmentation=none"]
PRIVATE = ["privacy=central", "encoder.norm=group", "strategy=fedavg", "strategy.weighting=uniform"]
UNTRAINED = ["rounds=1", "local_epochs=0", "evaluate_every=0", "final_evaluation=none"]
WAIT = 60  # seconds after which something is never to come

can_evaluate_in_background = order.can_evaluate_in_background


@pytest.fixture
def cores(monkeypatch):
    """Sets how many cores the server believes to have."""

    def have(number):
        monkeypatch.setattr(order, "available_cores", lambda: number)

    have(8)
    return have


@pytest.fixture
def threads(monkeypatch):
    """Names of the threads in which rounds are evaluated."""
    names = []
    evaluate = Evaluator.evaluate

    def noted(self, models, *, final=False):
        if not final:
            names.append(threading.current_thread().name.partition("_")[0])
        return evaluate(self, models, final=final)

    monkeypatch.setattr(Evaluator, "evaluate", noted)
    return names


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Run without an interruption, and return its contents."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run([*TINY, f"output_dir={folder}"])
    return contents(folder)


def contents(folder):
    """Return the round, the layers and the lines of a run, without times."""
    lines = read_lines(folder / "metrics.jsonl")
    for line in lines:
        del line["seconds"], line["client_seconds"]
    return latest_checkpoint(folder / "checkpoints").round, model_bits(folder), lines


# A schedule of stages changes what of the encoder runs from round to round.
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        pytest.param(["evaluate_every=2", "strategy=featarc"], marks=pytest.mark.heavy),
        pytest.param(STAGES, marks=pytest.mark.heavy),
    ],
    ids=["knn", "clusters", "stages"],
)
def test_the_numbers_are_those_of_one_thing_after_the_other(tmp_path, cores, threads, overrides):
    run([*TINY, *overrides, f"output_dir={tmp_path / 'one'}"])
    assert set(threads) == {"evaluation"}
    threads.clear()
    cores(1)
    run([*TINY, *overrides, f"output_dir={tmp_path / 'two'}"])
    assert set(threads) == {"MainThread"}
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize(
    "overrides",
    [
        ["early_stopping.monitor=knn", "early_stopping.patience=5"],  # decides whether there is a next round
        ["evaluation=fedu/linear", "evaluation.epochs=1"],  # trains a classifier with torch's own chance
    ],
)
def test_what_cannot_run_beside_a_round_does_not(tmp_path, cores, threads, overrides):
    run([*TINY, "rounds=2", *overrides, f"output_dir={tmp_path / 'run'}"])
    assert set(threads) == {"MainThread"}


@pytest.mark.parametrize(("there", "threads_each", "overlaps"), [(2, 1, True), (3, 2, False)])
def test_cores_must_be_free(tmp_path, monkeypatch, there, threads_each, overlaps):
    """In one process clients take as many cores as they have threads, and the evaluation as many more."""
    found = []
    monkeypatch.setattr(order, "available_cores", lambda: there)
    monkeypatch.setattr(
        order, "can_evaluate_in_background", lambda *given: found.append(can_evaluate_in_background(*given)) or False
    )
    overrides = [*TINY, *UNTRAINED, f"threads={threads_each}", f"output_dir={tmp_path / 'run'}"]
    run_local(build_components(compose(overrides), simulated_clients(2)))
    assert found == [overlaps]


def test_devices_receive_no_private_model_before_its_checkpoint():
    """A resumed run would release the model of that round again. In a simulation nobody receives it."""
    for overrides, edge, overlaps in ((PRIVATE, True, False), (PRIVATE, False, True), ([], True, True)):
        components = build_components(compose([*TINY, *UNTRAINED, "threads=1", *overrides]), simulated_clients(2))
        components = replace(components, client_data=None) if edge else components
        assert can_evaluate_in_background(components, 0) == overlaps


class Held:
    """Evaluations that wait until a round later than theirs has begun."""

    def __init__(self, monkeypatch):
        self.begun = [threading.Event() for _ in range(9)]
        evaluate, run_round = Evaluator.evaluate, TrainingLoop._run_round
        self.evaluated = 0

        def waits(evaluator, models, *, final=False):
            if not final:
                self.evaluated += 1
                assert self.evaluated == 3 or self.begun[self.evaluated + 1].wait(WAIT), "no round has begun beside it"
            return evaluate(evaluator, models, final=final)

        def begins(loop):
            self.begun[loop.state.round + 1].set()
            self.next(loop.state, lambda: run_round(loop))

        monkeypatch.setattr(Evaluator, "evaluate", waits)
        monkeypatch.setattr(TrainingLoop, "_run_round", begins)

    def next(self, state, round):
        return round()


def test_the_next_round_runs_meanwhile(tmp_path, monkeypatch, cores):
    held = Held(monkeypatch)
    run([*TINY, f"output_dir={tmp_path / 'run'}"])
    assert held.evaluated == 3
    assert [line["round"] for line in contents(tmp_path / "run")[2]] == [1, 2, 3]


@pytest.mark.parametrize("error", [KeyboardInterrupt, InputError("cannot be")])
def test_an_error_in_the_next_round_leaves_the_evaluated_one(whole, tmp_path, monkeypatch, cores, error):
    """The third round fails while the second is evaluated, whose checkpoint is not even due."""
    with monkeypatch.context() as patch:
        held = Held(patch)

        def fails(state, round):
            if state.round == 2:
                raise error
            return round()

        held.next = fails
        with pytest.raises(error if isinstance(error, type) else type(error)):
            run([*TINY, "checkpoint_every=3", f"output_dir={tmp_path / 'run'}"])
        assert held.evaluated == 2
    rounds_done, _, lines = contents(tmp_path / "run")
    assert (rounds_done, [line["round"] for line in lines]) == (2, [1, 2])
    assert all("knn" in line["evaluation"] for line in lines)
    run([f"resume={tmp_path / 'run'}"])
    resumed = contents(tmp_path / "run")
    for line in (*resumed[2], *whole[2]):
        line.pop("bytes_down", None)  # messages contain the path of the folder, which has another length
    assert resumed == whole


def test_what_an_evaluation_or_its_recording_raises_ends_the_run(tmp_path, monkeypatch, cores):
    """The second round's line cannot be written: the run goes back to the first."""
    write = Lines.on_round_end

    def full(self, end):
        if end.state.round == 2:
            raise OSError(28, "No space left on device")
        write(self, end)

    with monkeypatch.context() as patch:
        patch.setattr(Lines, "on_round_end", full)
        with pytest.raises(RunError, match="No space left"):
            run([*TINY, f"output_dir={tmp_path / 'run'}"])
    rounds_done, _, lines = contents(tmp_path / "run")
    assert (rounds_done, [line["round"] for line in lines]) == (1, [1])
    assert ending(tmp_path / "run")[0] == "failed"

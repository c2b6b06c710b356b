"""A client that runs out of accelerator memory is retried, and then gets a batch size that fits."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from client_app import memory_retry, worker
from client_app.app import app
from client_app.memory_retry import run_with_retry
from client_app.simulated import MARKER_KEY, SimulationMarker
from fedssl.config.load import load_settings, parse_client_config, with_run_folder
from fedssl.flower_internals import assign_message_id
from fedssl.wire.messages import ClientUpdate
from server_app.round import Round
from tests.client_app.test_edge_client import node, plan  # noqa: F401, fixtures
from tests.devices import ask, context
from tests.federation import Federation


@pytest.fixture
def fail(monkeypatch):
    """Return a function that makes training fail by number of the attempt and batch size; it returns the attempts."""
    monkeypatch.setattr(memory_retry, "_remedies", {})

    def install(fails):
        train, attempts = worker.train, []

        def train_or_fail(*arguments, **options):
            attempts.append(options["training"].batch_size)
            if fails(len(attempts), attempts[-1]):
                raise torch.OutOfMemoryError("CUDA out of memory at /secret/path")
            return train(*arguments, **options)

        monkeypatch.setattr(worker, "train", train_or_fail)
        return attempts

    return install


def test_a_device_is_retried_from_the_same_start(plan, node, fail, tmp_path):  # noqa: F811, the fixtures
    attempts = fail(lambda attempt, batch_size: attempt == 1)
    replies = [ask(plan, context(**{**node, "state_path": tmp_path / name})) for name in ("retried", "undisturbed")]
    assert len(attempts) == 3
    retried, undisturbed = (ClientUpdate.from_content(reply.content, 0).layers for reply in replies)
    assert all(np.array_equal(retried[name], undisturbed[name]) for name in undisturbed)


@pytest.mark.parametrize(("chosen", "used"), [("null", [None, False]), ("false", [False] * 2), ("true", [True] * 2)])
def test_the_second_attempt_captures_no_graphs_by_default(tmp_path, chosen, used):
    """Steps before a capture need memory beside that of graphs, which may be too much for the client alone, too."""
    overrides = ["dataset=digits", f"cuda_graphs={chosen}", "optimizer.fused=null"]
    settings = parse_client_config(with_run_folder(load_settings(overrides), tmp_path).client_yaml)
    attempts = []

    def run(attempt_settings):
        attempts.append(attempt_settings.training.cuda_graphs)
        if len(attempts) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "update"

    retried = run_with_retry(run, settings=settings, stages=(None, 0), try_steps=Mock(), names_others=False)
    assert (retried, attempts) == ("update", used)


def test_a_device_replies_with_a_batch_size_that_fits(plan, node, fail):  # noqa: F811, the fixtures
    fail(lambda attempt, batch_size: batch_size > 4)
    assert ask(plan, context(**node)).error.reason == (
        "batch_size=8 and precision=fp32 do not fit into accelerator memory; set batch_size=4, which fits"
    )


@pytest.mark.heavy
def test_the_first_attempt_of_a_retrying_engine_fails(tmp_path, fail):
    attempts = fail(lambda attempt, batch_size: True)
    federation = Federation(tmp_path, "batch_size=8", "aggregation.min_updates=1")
    (message, *_) = Round(federation.components.federation, federation.state).messages
    assign_message_id(message)
    node_context = federation.grid._contexts[message.metadata.dst_node_id]
    node_context.node_config[MARKER_KEY] = SimulationMarker(engine_retries=True)
    assert app(message, node_context).error.reason.startswith("OutOfMemoryError")
    assert len(attempts) == 1
    node_context.node_config[MARKER_KEY] = SimulationMarker()
    assert "no batch_size fits; set a smaller encoder" in app(message, node_context).error.reason


@pytest.mark.parametrize(("method", "tried"), [("simclr", [(4, "fp32"), (2, "fp32")]), ("byol", [(4, "fp32")])])
def test_no_batch_below_that_of_the_method_is_recommended(method, tried, tmp_path, monkeypatch):
    settings = with_run_folder(load_settings([f"method={method}", "batch_size=8"]), tmp_path)
    settings = parse_client_config(settings.client_yaml)
    monkeypatch.setattr(memory_retry, "_supports_bf16", lambda device: False)
    found = []

    def try_steps(batch_size, precision):
        found.append((batch_size, precision))
        raise torch.OutOfMemoryError("full")

    reason = memory_retry._reason(settings, try_steps, names_others=False)
    assert found == tried
    assert reason.endswith("no batch_size fits; set a smaller encoder")

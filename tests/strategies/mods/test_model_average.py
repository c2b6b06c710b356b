"""Averages over rounds: by hand, what is evaluated and exported, and that training goes on with the model itself."""

import numpy as np
import pytest

from fedssl.export import load_encoder
from simulation.run import run
from strategies.mods.model_average import EMA, LastModels
from strategies.types import EVALUATED
from tests.federation import Federation
from tests.test_digests import BASE


def averages(average, values):
    state, result = {}, []
    for value in values:
        state = average.step(state, {"w": np.array([value], dtype=np.float32)})
        result.append(float(state[EVALUATED]["w"][0]))
    return result


def test_averages_by_hand():
    # Decay 0.75: 4, 0.75 * 4 + 0.25 * 8 = 5, 0.75 * 5 + 0.25 * 1 = 4.
    assert averages(EMA(decay=0.75), [4, 8, 1]) == [4, 5, 4]
    # The last two: 4, (4 + 8) / 2, (8 + 1) / 2.
    assert averages(LastModels(rounds=2), [4, 8, 1]) == [4, 6, 4.5]


@pytest.mark.parametrize("average", [EMA(decay=0.0), LastModels(rounds=1)])
def test_the_neutral_value_is_the_model_itself(average):
    values = [0.1, np.float32(1e30), 3.3]
    assert averages(average, values) == [float(np.float32(value)) for value in values]


def test_training_goes_on_with_the_model_itself(tmp_path):
    plain, averaged = Federation(tmp_path / "0"), Federation(tmp_path / "1", "model_average=ema")
    models = []
    for _ in range(2):
        models.append(plain.run(1))
        averaged.run(1)
        for name, layer in plain.layers.items():
            np.testing.assert_array_equal(averaged.layers[name], layer)
    evaluated = averaged.state.models["global"].evaluated
    for name, layer in plain.layers.items():
        expected = layer if layer.dtype.kind != "f" else 0.9 * models[0][name].astype(float) + 0.1 * layer.astype(float)
        np.testing.assert_allclose(evaluated[name], expected, rtol=1e-6, atol=1e-7)


def test_stages_that_begin_to_train_start_a_new_average(tmp_path):
    federation = Federation(tmp_path, "schedule=layer_wise", "rounds=8", "model_average=last")
    held = []
    for _ in range(8):
        federation.run(1)
        model = federation.state.models["global"]
        held.append(len(model.mod_states["LastModels"]) - 1)  # without the average
        if held[-1] == 1:
            assert all((model.evaluated[name] == layer).all() for name, layer in model.layers.items())
    assert held == [1, 2] * 4  # four stages of two rounds


def test_the_average_is_exported_and_resumed(tmp_path):
    overrides = [*BASE, "rounds=3", "model_average=last", "model_average.rounds=2"]
    run([*overrides, f"output_dir={tmp_path / 'whole'}"])
    run([*overrides, f"output_dir={tmp_path / 'half'}", "pause_after=2"])
    run([f"resume={tmp_path / 'half'}", "pause_after=null"])
    run([*BASE, "rounds=3", f"output_dir={tmp_path / 'plain'}"])
    whole, half, plain = (
        load_encoder(tmp_path / name / "encoder.pt").state_dict() for name in ("whole", "half", "plain")
    )
    assert all((half[name] == value).all() for name, value in whole.items())
    assert any((plain[name] != value).any() for name, value in whole.items())

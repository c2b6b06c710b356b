"""FedU: every cell of Table 4, and when DAPU decides and when that holds."""

from functools import partial

import numpy as np
import pytest
import torch

from fedssl.encoders import Encoder
from fedssl.errors import InputError
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import exchanged_names
from fedssl.rules import check_rules
from strategies.fedu import DISTANCE, USE_GLOBAL_PREDICTOR, FedU
from strategies.l_dawa_fedu import LDAWAFedU
from tests.arrays import same
from tests.contexts import run_context
from tests.states import load_tensors
from tests.strategies.clients import UNIT, make_byol, make_plan, make_simclr, participate, some_layers


def in_pairs(method):
    return run_context(method, num_clients=10, clients_per_round=2)


@pytest.mark.parametrize(
    ("aggregate", "update", "predictor"),
    [
        ("online", "online", "global"),
        ("online", "target", "local"),
        ("target", "both", "global"),
        *(pytest.param("target", update, "local", marks=pytest.mark.heavy) for update in ("online", "target", "both")),
    ],
)
def test_every_cell_of_table_4(tmp_path, aggregate, update, predictor):
    shared_method, shared_strategy = make_byol(), FedU(aggregate=aggregate, update=update, predictor=predictor)
    check_rules([shared_strategy.problem], in_pairs(shared_method))
    previous = {}
    for round in (1, 2, 3):
        layers = some_layers(shared_method, round)
        plan, others = make_plan(round, layers), make_plan(round, some_layers(shared_method, 5))
        # Another client uses the same objects in between; the third one, in a process of its own, is like the first.
        participate(shared_method, shared_strategy, others, tmp_path / "other", step=0.5)
        began, ended, sent = participate(shared_method, shared_strategy, plan, tmp_path / "shared")
        fresh = FedU(aggregate=aggregate, update=update, predictor=predictor)
        assert same(began, participate(make_byol(), fresh, plan, tmp_path / "fresh")[0])

        taken = {"target_encoder", "target_projector", "encoder", "projector", "predictor"}
        if round > 1:
            taken -= {"encoder", "projector"} if update == "target" else set()
            taken -= {"target_encoder", "target_projector"} if update == "online" else set()
            taken -= {"predictor"} if predictor == "local" else set()
        for name, array in began.items():
            expected = layers[name.removeprefix("target_")] if name.partition(".")[0] in taken else previous[name]
            np.testing.assert_array_equal(array, expected, err_msg=f"round {round}: {name}")

        assert list(sent) == exchanged_names(shared_method)
        for name, array in sent.items():
            source = f"target_{name}" if aggregate == "target" and not name.startswith("predictor") else name
            np.testing.assert_array_equal(array, ended[source], err_msg=f"round {round}: {name}")
        previous = ended


@pytest.mark.parametrize(("make", "head"), [(make_byol, "predictor"), (make_simclr, "projector")])
@pytest.mark.parametrize("strategy", [FedU, LDAWAFedU])
def test_the_decision_of_one_round_holds_in_the_next_one(tmp_path, make, head, strategy):
    steps = {1: 0.5, 2: 0.125, 3: 0.125, 4: 0.5, 5: 0.5}
    takes_global = {1: True, 2: False, 3: True, 4: True, 5: False}  # the first always, then what the round before said
    previous = {}
    for round, step in steps.items():
        method, tested = make(), strategy(predictor_threshold=0.25 * UNIT)  # as in a new process
        plan = make_plan(round, some_layers(method, round))
        began, ended, _ = participate(method, tested, plan, tmp_path, step=step)
        for name, array in began.items():
            if name.startswith(f"{head}."):
                expected = plan.layers[name] if takes_global[round] else previous[name]
            elif name.startswith("target_"):
                expected = previous.get(name, plan.layers[name.removeprefix("target_")])
            else:
                expected = plan.layers[name]
            np.testing.assert_array_equal(array, expected, err_msg=f"round {round}: {name}")
        state = load_tensors(tmp_path, before=round + 1)
        assert float(state[DISTANCE]) == pytest.approx(step * UNIT, rel=1e-5)
        assert bool(state[USE_GLOBAL_PREDICTOR]) == (step == 0.125)
        # No more than the next participation needs.
        parts = {name.partition(".")[0] for name in state}
        assert parts == {"dapu", *method.local_parts, *([] if step == 0.125 else [head])}
        previous = ended


class Bare(SSLMethod):
    """An encoder and nothing else."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder


def make_bare():
    encoder = Encoder()
    encoder.fc = torch.nn.Linear(3, 2)
    return Bare(encoder)


@pytest.mark.parametrize(
    ("options", "make", "sentence"),
    [
        ({"aggregate": "target"}, make_simclr, "strategy.aggregate=target .* SimCLR has none; set both to online"),
        ({"update": "both"}, make_simclr, "strategy.update=both needs a method with target networks"),
        ({}, partial(make_byol, target_init="reset"), "strategy.update=online; set method.target_init=persist"),
        (
            {"update": "target"},
            partial(make_byol, target_init="reset"),
            "strategy.update=target; set method.target_init=persist",
        ),
        ({}, make_bare, "strategy.predictor=dapu needs .* Bare exchanges neither; set strategy.predictor=global"),
    ],
)
@pytest.mark.parametrize("strategy", [FedU, LDAWAFedU])
def test_refused_combinations(strategy, options, make, sentence):
    with pytest.raises(InputError, match=sentence):
        check_rules([strategy(**options).problem], in_pairs(make()))


@pytest.mark.parametrize(
    ("strategy", "choices"), [(FedU, "examples or uniform"), (LDAWAFedU, "examples or uniform or loss")]
)
def test_refused_weightings(strategy, choices):
    with pytest.raises(InputError, match=f"^strategy.weighting=size must be {choices}$"):
        strategy(weighting="size")

"""FedCA: its loss slowly and by hand, the dictionary, the teacher, what travels, and whole runs."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from fedssl.config.load import compose
from fedssl.losses import nt_xent, teacher_distance
from fedssl.methods.base import build_method
from fedssl.methods.fedca import FedCA, enqueue
from fedssl.methods.heads import MLP
from fedssl.methods.simclr import SimCLR
from fedssl.model_arrays import copy_layers, exchanged_names, names_in_parts
from fedssl.optimizers.sam import SAM
from fedssl.views import Views
from fedssl.wire.records import arrays_to_record
from server_app.messaging import receive
from server_app.round import Round
from strategies.types import GLOBAL
from tests.federation import Federation, finish
from tests.fedssl.losses.test_contrastive import slow_nt_xent
from tests.fedssl.methods.made import draw, encoder, step, views
from tests.methods import save_teacher

HEAD = partial(MLP, hidden_dim=16, out_dim=4)
WORDS = ["method=fedca", "strategy=fedavg", "method.projector.hidden_dim=16", "method.projector.out_dim=8"]
WORDS += ["method.sent_per_round=3", "method.dictionary_capacity=8"]
ALIGNED = ["method.alignment_weight=0.5"]


def make_method(*, temperature=0.5, sent_per_round=3, dictionary_capacity=5, alignment_weight=0.0) -> FedCA:
    sizes = {"sent_per_round": sent_per_round, "dictionary_capacity": dictionary_capacity}
    return FedCA(encoder(), projector=HEAD, temperature=temperature, alignment_weight=alignment_weight, **sizes)


def with_entries(method: FedCA, rows: Tensor) -> FedCA:
    method.dictionary.zero_()
    method.dictionary[: len(rows)] = rows.float()
    method.start_round(first=False)
    return method


@pytest.mark.parametrize(("batch", "entries"), [(1, 1), (4, 7), (5, 0)])
def test_further_negatives_against_the_equation(batch, entries):
    z1, z2, negatives = draw(batch, 6, seed=1), draw(batch, 6, seed=2), draw(entries, 6, seed=3)
    result = nt_xent(z1, z2, temperature=0.3, negatives=negatives)
    assert result.item() == pytest.approx(slow_nt_xent(z1, z2, 0.3, negatives), rel=1e-12)


def test_the_loss_has_both_terms():
    method = with_entries(make_method(alignment_weight=0.25), draw(2, 4, seed=5))
    with torch.no_grad():
        for parameter in method.teacher.parameters():
            parameter.mul_(1.5)  # another encoder than the one that learns
    method.train()
    view1, view2 = views()
    both = torch.cat((view1, view2))
    result = method.loss(Views.of(view1, view2))
    with torch.no_grad():
        h = method.encoder(both)
        z1, z2 = method.projector(h).double().chunk(2)
        teacher_features = method.teacher(both)
    of_teacher = teacher_distance(h.double(), teacher_features.double()).item()
    expected = slow_nt_xent(z1, z2, 0.5, method.dictionary[:2].double()) + 0.25 * of_teacher
    assert result.item() == pytest.approx(expected, rel=1e-5)
    result.backward()
    assert all((value.grad is None) == name.startswith("teacher.") for name, value in method.named_parameters())


def test_the_teacher_stays_as_it_is_in_training():
    method = make_method(alignment_weight=0.5)
    before = copy_layers(method, names_in_parts(method, ["teacher"]))
    method.train()
    step(method, lr=0.1)
    assert not method.teacher.training
    assert method.encoder.training
    for name, array in copy_layers(method, names_in_parts(method, ["teacher"])).items():
        np.testing.assert_array_equal(array, before[name])


def test_the_queue_by_hand():
    """Three entries: first from two clients, then one more pushes the oldest off; zeros are no entries."""
    e = np.eye(4, dtype=np.float32)
    nothing = np.zeros((1, 4), np.float32)
    first = enqueue(np.zeros((3, 4), np.float32), [np.stack([2 * e[0], 0 * e[0]]), 0.1 * e[1:2]])
    np.testing.assert_array_equal(first, [e[0], e[1], 0 * e[0]])
    assert first.dtype == np.float32
    np.testing.assert_array_equal(enqueue(first, [nothing, nothing]), first)
    second = enqueue(first, [nothing, e[2:4]])
    np.testing.assert_array_equal(second, [e[2], e[3], e[0]])
    np.testing.assert_array_equal(enqueue(second, [e]), e[:3])


def test_all_clients_are_in_a_queue_that_is_too_short():
    newest = [np.eye(4)[[client] * 3] for client in range(4)]  # 12 rows for 8
    found = enqueue(np.zeros((8, 4)), newest).argmax(axis=1)
    assert found.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]  # rows 0, 1, 3, 4, 6, 7, 9, 10


def test_a_client_sends_its_first_projections():
    method = make_method(sent_per_round=5, dictionary_capacity=8)
    rows = torch.eye(4)
    method.store_projections(2 * rows[:3])
    assert torch.equal(method.local_dictionary, torch.cat((rows[:3], torch.zeros(2, 4))))
    for _ in range(2):  # what has no room is left out
        method.store_projections(3 * rows.flip(0))
        assert torch.equal(method.local_dictionary, rows[[0, 1, 2, 3, 2]])
    assert method.named_tensors["local_dictionary"] is method.local_dictionary
    method.start_round(first=False)
    assert not method.local_dictionary.any()
    view1, view2 = views()
    method.loss(Views.of(view1, view2))
    z1, _ = method.projector(method.encoder(torch.cat((view1, view2)))).chunk(2)
    torch.testing.assert_close(method.local_dictionary, torch.nn.functional.normalize(z1[:5], dim=1))


def test_both_passes_of_sam_send_the_same_rows():
    view1, view2 = views()
    method = make_method(sent_per_round=2 * len(view1), dictionary_capacity=2 * len(view1))
    optimizer = SAM(method.parameters(), lr=0.1, rho=0.5)

    def backward():
        loss = method.loss(Views.of(view1, view2))
        loss.backward()
        return loss.detach()

    for _ in range(2):
        optimizer.compute_gradient(backward, list(method.buffers()))
    assert torch.equal(*method.local_dictionary.chunk(2))  # the weights are the same without a step
    assert method.local_dictionary.any(dim=1).all()


def test_parts():
    method = make_method(alignment_weight=0.5)
    assert {name.partition(".")[0] for name in exchanged_names(method)} == {"encoder", "projector"}
    assert (method.uploaded_parts, method.broadcast_parts) == (("local_dictionary",), ("dictionary", "teacher"))
    assert (method.static_parts, method.local_parts) == (("teacher",), ())
    plain = make_method(sent_per_round=0)
    assert (plain.uploaded_parts, plain.broadcast_parts, plain.static_parts) == ((), (), ())
    assert {name.partition(".")[0] for name in plain.named_tensors} == {"encoder", "projector"}


@pytest.mark.parametrize("off", ["method.sent_per_round=0", "method.sent_per_round=8"])
def test_without_entries_and_alignment_it_is_simclr_bit_for_bit(off):
    overrides = ["encoder.width=4", "batch_size=16"]
    ours = build_method(compose([*overrides, "method=fedca", off]).model)
    simclr = build_method(compose([*overrides, "method=simclr"]).model)
    assert isinstance(simclr, SimCLR)
    for method in (ours, simclr):
        method.start_round(first=True)
        loss = method.loss(Views.of(*views(16)))
        loss.backward()
    for name, parameter in simclr.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name))
        assert torch.equal(parameter.grad, ours.get_parameter(name).grad), name


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_teacher(tmp_path_factory.mktemp("teacher") / "encoder.pt", "encoder.width=4", "seed=7")


def test_a_federation_shares_what_its_clients_send(tmp_path, teacher):
    """Two of three clients a round; the teacher comes to each of them once."""
    overrides = [*WORDS, *ALIGNED, f"teacher={teacher}", "num_clients=3", "clients_per_round=2"]
    federation = Federation(tmp_path, *overrides)
    method = federation.method
    given, seen, bytes_down = np.zeros((8, 8), np.float32), set(), {}
    for _ in range(4):
        federation.run(1)
        assert federation.report.dropped == {}
        rows = federation.report.clients
        for row, plan, update in zip(rows, federation.plans[-2:], federation.updates[-2:], strict=True):
            first = row.client not in seen
            seen.add(row.client)
            of_teacher = names_in_parts(method, ["teacher"]) if first else ()
            assert set(plan["method-broadcast"]) == {"dictionary", *of_teacher}
            np.testing.assert_array_equal(plan["method-broadcast"]["dictionary"].numpy(), given)
            assert set(plan["arrays"]) == set(update["arrays"]) == set(exchanged_names(method))
            local = update["method-upload"]["local_dictionary"].numpy()
            np.testing.assert_allclose(np.linalg.norm(local, axis=1), 1, rtol=1e-5)
            bytes_down.setdefault(first, set()).add(row.bytes_down)
        sent = [update["method-upload"]["local_dictionary"].numpy() for update in federation.updates[-2:]]
        given = enqueue(given, sent)
        np.testing.assert_array_equal(federation.state.models[GLOBAL].broadcast["dictionary"], given)
    assert given.any(axis=1).all()
    teacher_bytes = sum(method.named_tensors[name].nbytes for name in names_in_parts(method, ["teacher"]))
    assert min(bytes_down[True]) - max(bytes_down[False]) > teacher_bytes
    communication = federation.strategy.describe_communication(method)
    dictionary, teacher = "dictionary (made by the server side)", "teacher (of the server side, once)"
    assert communication.download == f"encoder, projector, {dictionary}, {teacher}"
    assert communication.upload == "encoder, projector, local_dictionary (for the server side)"


def test_bad_rows_drop_the_client_and_others_are_normalized(tmp_path):
    federation = Federation(tmp_path, *WORDS, "num_clients=3")
    one = Round(federation.components.federation, federation.state)
    replies = list(receive(federation.grid, one.messages, timeout=60))
    sent = [reply.content["method-upload"]["local_dictionary"].numpy() for reply in replies]
    not_finite = sent[2].copy()
    not_finite[0, 0] = np.inf
    replies[0].content["method-upload"] = arrays_to_record({"local_dictionary": 1e4 * sent[0]})
    replies[2].content["method-upload"] = arrays_to_record({"local_dictionary": not_finite})
    state, report = finish(one, replies)
    assert report.dropped == {2: "layer local_dictionary has values that are not finite, or far too large"}
    result = state.models[GLOBAL].broadcast["dictionary"]
    np.testing.assert_allclose(result, np.concatenate([*sent[:2], np.zeros((2, 8))]), atol=1e-6)

"""The order in which Ray actors run the clients of blocks, and what they sum."""

from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayError

from server_app.block_sums import LostSumError
from simulation.block_queue import ActorSum, BlockQueue, Call


class Actor:
    """An actor that records which blocks were taken."""

    def __init__(self):
        self.taken = []
        self.take_block = SimpleNamespace(remote=self._take)

    def _take(self, block):
        self.taken.append(block)
        return f"sum {block}"


def make_queue(*sizes):
    """Return a queue with blocks of these sizes; the message of a call is the number of its client."""
    queue, client = BlockQueue(), 0
    for block, size in enumerate(sizes):
        for _ in range(size):
            queue.add(Call(message=client, payload=None, block=block))
            client += 1
    return queue


def client_of(call):
    return call[0].message


def test_calls_without_a_block_run_in_order_and_are_not_summed():
    queue = BlockQueue()
    for number in range(3):
        queue.add(Call(message=number, payload=None))
    assert [queue.next_call("a") for _ in range(3)] == [(Call(message=n, payload=None), None) for n in range(3)]
    assert not queue


def test_an_actor_runs_its_block_in_order_and_then_the_next_one():
    queue, a, b = make_queue(2, 2, 1), Actor(), Actor()
    first, second = queue.next_call(a), queue.next_call(b)
    assert (client_of(first), client_of(second)) == (0, 2)
    assert (first[1].block, second[1].block) == (0, 1)
    assert client_of(queue.next_call(b)) == 3
    assert client_of(queue.next_call(b)) == 4  # block 2
    assert client_of(queue.next_call(a)) == 1
    assert not queue


def test_an_idle_actor_runs_the_last_client_of_another_block_without_summing_it():
    queue, a, b = make_queue(4), Actor(), Actor()
    call, block_sum = queue.next_call(a)
    stolen, no_sum = queue.next_call(b)
    assert (call.message, stolen.message, no_sum) == (0, 3, None)
    assert queue.next_call(a)[1] is block_sum


def test_a_sum_is_taken_once_after_the_last_client_of_its_actor():
    queue, a, b = make_queue(3, 1), Actor(), Actor()
    _, block_sum = queue.next_call(a)
    block_sum.is_used = True
    queue.take_finished([block_sum])
    assert a.taken == []
    queue.next_call(a)
    _, other = queue.next_call(b)
    queue.next_call(b)  # the last client of block 0
    queue.take_finished([block_sum])  # its second client is running
    assert (a.taken, b.taken) == ([], [])
    other.is_used = True
    for _ in range(2):
        queue.take_finished([])
    assert (a.taken, b.taken) == ([0], [1])


def test_a_sum_without_clients_is_not_taken():
    queue, a = make_queue(1), Actor()
    queue.next_call(a)
    queue.take_finished([])
    assert a.taken == []


def test_no_client_is_summed_after_one_that_replies_later():
    queue, a = make_queue(3), Actor()
    queue.next_call(a)
    call, block_sum = queue.next_call(a)
    block_sum.is_used = True
    queue.close(call)
    assert queue.next_call(a)[1] is None
    queue.take_finished([])
    assert a.taken == [0]


def test_an_actor_that_stops_leaves_its_sums(monkeypatch):
    waited = []
    monkeypatch.setattr(ray, "wait", lambda references, **options: waited.extend(references))
    queue, a, b = make_queue(2, 2), Actor(), Actor()
    for _ in range(2):
        queue.next_call(a)[1].is_used = True
    queue.stop(a)
    assert (a.taken, waited) == ([0], ["sum 0"])
    queue.next_call(b)[1].is_used = True
    queue.stop(b)
    assert queue.next_call(a)[1] is None  # the rest of block 1
    queue.stop(a)
    assert waited == ["sum 0", "sum 1"]


def test_clearing_removes_calls_and_sums():
    queue, a = make_queue(2), Actor()
    call, block_sum = queue.next_call(a)
    block_sum.is_used = True
    queue.clear()
    queue.close(call)
    queue.take_finished([])
    queue.stop(a)
    assert not queue
    assert a.taken == []


def test_a_lost_sum_has_a_reason(monkeypatch):
    block_sum = ActorSum(Actor(), 0, is_used=True)
    with pytest.raises(LostSumError, match="has not replied in time"):
        block_sum.get()
    block_sum.take()

    def fail(reference):
        raise RayError("\nthe actor died\n")

    monkeypatch.setattr(ray, "get", fail)
    with pytest.raises(LostSumError, match="its process died: the actor died"):
        block_sum.get()

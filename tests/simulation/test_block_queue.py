"""The order in which Ray actors run the clients of blocks, and what they sum."""

import random
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayError

from server_app.exchanges.sums import LostSumError
from simulation.block_queue import ActorSum, BlockQueue, Call, task_size


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


def clients_of(calls):
    return [client_of(call) for call in calls]


@pytest.mark.parametrize(
    ("waiting", "processes", "seconds", "size"),
    [
        (300, 2, None, 1),  # not measured
        (300, 2, 0.01, 30),  # 0.3 s / 0.01 s, less than the share of ceil(300 / 4) = 75
        (60, 2, 0.01, 15),  # ceil(60 / 4)
        (61, 2, 0.01, 16),  # ceil(61 / 4)
        (3, 2, 0.01, 1),  # ceil(3 / 4): the last clients run alone
        (300, 16, 0.001, 10),  # ceil(300 / 32)
        (300, 2, 0.16, 1),  # 0.3 s / 0.16 s
        (300, 2, 20.0, 1),  # a client is longer than a task
    ],
)
def test_a_task_has_half_of_an_equal_share(waiting, processes, seconds, size):
    assert task_size(waiting, processes=processes, seconds=seconds) == size


def test_a_task_continues_with_the_next_block():
    queue, a = make_queue(3, 3), Actor()
    calls = queue.next_calls(a, 4)
    assert clients_of(calls) == [0, 1, 2, 3]
    assert [block_sum.block for _, block_sum in calls] == [0, 0, 0, 1]
    assert clients_of(queue.next_calls(a, 100)) == [4, 5]
    assert queue.next_calls(a, 1) == []


def test_clients_that_a_task_has_not_run_are_next():
    queue, a, b = make_queue(4, 2), Actor(), Actor()
    calls = queue.next_calls(a, 6)
    queue.put_back(calls[3:])  # the last client of block 0, and block 1
    assert len(queue) == 3
    again = queue.next_calls(a, 2)
    assert again == calls[3:5]
    assert client_of(queue.next_calls(b, 1)[0]) == 5


def test_a_client_put_back_elsewhere_is_in_no_sum():
    """Process b has got clients 5 and 4 of the block of a, and c has got client 3."""
    queue, a, b, c = make_queue(6), Actor(), Actor(), Actor()
    queue.next_calls(a, 1)
    calls = queue.next_calls(b, 2)
    assert clients_of(calls) == [5, 4]
    assert clients_of(queue.next_calls(c, 1)) == [3]
    queue.put_back(calls[1:])
    call, block_sum = queue.next_call(a)
    assert (call.message, block_sum) == (4, None)
    assert [(call.message, block_sum.block) for call, block_sum in queue.next_calls(a, 9)] == [(1, 0), (2, 0)]


@pytest.mark.parametrize("seed", range(20))
def test_clients_run_once_and_sums_have_first_clients(seed):
    """Processes with tasks of any length, which stop anywhere; some stop after a client that replies later."""
    chance = random.Random(seed)
    sizes = [chance.randint(1, 9) for _ in range(chance.randint(1, 8))]
    queue, actors, tasks = make_queue(*sizes), [Actor() for _ in range(3)], {}
    ran, summed, single = [], {block: [] for block in range(len(sizes))}, {block: [] for block in range(len(sizes))}
    while queue or tasks:
        number = chance.randrange(len(actors))
        if number not in tasks and queue:
            tasks[number] = queue.next_calls(actors[number], chance.randint(1, 6))
        elif number in tasks:
            calls = tasks.pop(number)
            done = chance.randint(1, len(calls))
            queue.put_back(calls[done:])
            later = chance.random() < 0.2
            for index, (call, block_sum) in enumerate(calls[:done]):
                ran.append(call.message)
                is_late = later and index == done - 1
                (single if is_late or block_sum is None else summed)[call.block].append(call.message)
            if later:
                queue.close(calls[done - 1][0])
    assert sorted(ran) == list(range(sum(sizes)))
    for block, clients in summed.items():
        assert clients == sorted(clients)
        assert all(client > max(clients, default=-1) for client in single[block])


def test_an_actor_runs_its_blocks_in_order():
    queue, a, b = make_queue(2, 2, 1), Actor(), Actor()
    first, second = queue.next_call(a), queue.next_call(b)
    assert (client_of(first), client_of(second)) == (0, 2)
    assert (first[1].block, second[1].block) == (0, 1)
    assert client_of(queue.next_call(b)) == 3
    assert client_of(queue.next_call(b)) == 4  # block 2
    assert client_of(queue.next_call(a)) == 1
    assert not queue


def test_an_idle_actor_runs_clients_of_others_without_summing():
    queue, a, b = make_queue(4), Actor(), Actor()
    call, block_sum = queue.next_call(a)
    stolen, no_sum = queue.next_call(b)
    assert (call.message, stolen.message, no_sum) == (0, 3, None)
    assert queue.next_call(a)[1] is block_sum


def test_a_sum_is_taken_once_after_its_last_client():
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


def test_a_sum_without_clients_is_not_taken():
    queue, a = make_queue(1), Actor()
    queue.next_call(a)
    queue.take_finished([])
    assert a.taken == []


def test_calls_without_a_block_are_ordered_and_not_summed():
    queue = BlockQueue()
    for number in range(3):
        queue.add(Call(message=number, payload=None))
    assert [queue.next_call("a") for _ in range(3)] == [(Call(message=n, payload=None), None) for n in range(3)]
    assert not queue

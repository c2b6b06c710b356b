import pytest

from server_app.callbacks.base import Callback, Callbacks


class Noted(Callback):
    def __init__(self, name, calls, error=None):
        self.name, self.calls, self.error = name, calls, error

    def on_run_end(self, end):
        self.calls.append((self.name, end.status))
        if self.error is not None:
            raise self.error


def test_all_callbacks_see_the_end_after_an_error():
    calls, first = [], OSError("first")
    callbacks = Callbacks([Noted("a", calls), Noted("b", calls, first), Noted("c", calls, OSError("second"))])
    with pytest.raises(OSError, match="first"), callbacks.running():
        pass
    assert calls == [("a", "finished"), ("b", "finished"), ("c", "failed")]


def test_an_interrupt_of_the_rounds_is_the_error():
    calls = []
    with pytest.raises(KeyboardInterrupt), Callbacks([Noted("a", calls, OSError("later"))]).running() as end:
        raise KeyboardInterrupt
    assert calls == [("a", "interrupted")]
    assert isinstance(end.error, KeyboardInterrupt)


def test_the_first_reason_stops_and_only_observers_see_updates():
    stops, observes = Callback(), Callback()
    stops.stop_reason = lambda: "enough"
    observes.observes = True
    callbacks = Callbacks([Callback(), stops, observes])
    assert callbacks.stop_reason() == "enough"
    assert callbacks.observers == [observes.on_update]

"""Errors of a class or function of the settings: a sentence has the cause and the place."""

import pytest

from fedssl.config.component import Component
from fedssl.errors import InputError, RunError


def fail(kind, *, reason="why"):
    if kind == "chain":
        raise RuntimeError("no checkpoint") from KeyError("never raised")
    raise {"key": KeyError(5), "zero": ZeroDivisionError("zero"), "value": ValueError("two\nlines")}.get(
        kind, RuntimeError(reason)
    )


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("key", r"fail failed: KeyError: 5 \(test_component.py, line \d+\)$"),
        ("zero", r"fail failed: ZeroDivisionError: zero \(test_component.py, line \d+\)$"),
        ("chain", r"fail failed: RuntimeError: no checkpoint \(test_component.py, line \d+\)$"),
        ("value", "fail rejects its settings: two lines$"),
        ("other", r"fail failed: RuntimeError: why \(test_component.py, line \d+\)$"),
    ],
)
def test_the_error_of_a_component_has_its_cause(kind, sentence):
    with pytest.raises(InputError, match=f"^{__name__}.{sentence}"):
        Component({"_target_": f"{__name__}.fail"}).instantiate(kind)


def test_a_wrong_argument_is_a_wrong_setting():
    with pytest.raises(InputError, match="fail rejects its settings: .*unexpected keyword argument 'other'"):
        Component({"_target_": f"{__name__}.fail", "other": 1}).instantiate("key")


def test_a_limit_of_threads_is_no_wrong_setting():
    component = Component({"_target_": f"{__name__}.fail", "reason": "can't start new thread"})
    with pytest.raises(RunError, match="no further thread can be started; raise the limit of the shell: ulimit -u"):
        component.instantiate("other")


def test_an_object_of_another_class_is_refused():
    with pytest.raises(InputError, match="builtins.str makes a str; return a builtins.int or a subclass"):
        Component({"_target_": "builtins.str"}).make(int)
    assert Component({"_target_": "builtins.bool"}).make(int) is False

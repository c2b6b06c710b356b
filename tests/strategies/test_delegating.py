"""Wrappers forward every hook and every attribute of the base classes."""

import inspect
from unittest.mock import create_autospec, sentinel

import pytest

from strategies.base import ClientStrategy, ServerStrategy
from strategies.delegating import DelegatingClient, DelegatingServer

WRAPPERS = [(DelegatingServer, ServerStrategy), (DelegatingClient, ClientStrategy)]


def hooks(base):
    return [name for name, value in vars(base).items() if inspect.isfunction(value) and not name.startswith("_")]


@pytest.mark.parametrize(
    ("wrapper", "base", "hook"), [(wrapper, base, hook) for wrapper, base in WRAPPERS for hook in hooks(base)]
)
def test_every_hook_is_forwarded(wrapper, base, hook):
    inner = create_autospec(base, instance=True)
    getattr(inner, hook).return_value = sentinel.result
    arguments, keywords = [], {}
    for parameter in list(inspect.signature(getattr(base, hook)).parameters.values())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY:
            keywords[parameter.name] = getattr(sentinel, parameter.name)
        else:
            arguments.append(getattr(sentinel, parameter.name))
    result = getattr(wrapper(inner), hook)(*arguments, **keywords)
    getattr(inner, hook).assert_called_once_with(*arguments, **keywords)
    assert result is (None if hook in ("validate", "plot") else sentinel.result)


@pytest.mark.parametrize(("wrapper", "base"), WRAPPERS)
def test_every_hook_has_the_signature_of_the_base_class(wrapper, base):
    for hook in hooks(base):
        assert inspect.signature(vars(wrapper)[hook]) == inspect.signature(vars(base)[hook]), hook


@pytest.mark.parametrize(("wrapper", "base"), WRAPPERS)
def test_every_attribute_is_that_of_the_wrapped_strategy(wrapper, base):
    inner = create_autospec(base, instance=True)
    for name in base.__annotations__:
        setattr(inner, name, getattr(sentinel, name))
    assert base.__annotations__
    for name in base.__annotations__:
        assert getattr(wrapper(inner), name) is getattr(sentinel, name), name

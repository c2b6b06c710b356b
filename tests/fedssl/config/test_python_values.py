"""Values of Python reach the settings unchanged, whatever characters they have."""

from pathlib import Path

import numpy as np
import pytest

import fedssl
from fedssl.config.overrides import parse
from fedssl.config.python_values import to_overrides

TEXTS = [
    "a, b",
    "a=b",
    "it's",
    '"quoted"',
    "$HOME",
    "a\\",
    "\\'",
    "[x]",
    "{x: 1}",
    "(x)",
    "null",
    "True",
    "nan",
    "1e5",
    " x ",
    "C:\\Users\\Ada Lovelace\\photos",
    "#1 & 2; 3 | 4",
    "Bilder für Überwachung",
    "x y/*.png",
    "~x",
    "!",
    "'",
]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_kept(text):
    (path,) = parse(to_overrides([f"dataset.path=/{text}"], {}))
    assert path.value() == f"/{text}".strip()  # as on the command line
    (path, names) = parse(to_overrides([], {"dataset.path": f"/{text}", "x": [text, text]}))
    assert path.value() == f"/{text}"
    assert names.value() == [text, text]
    settings = fedssl.compose(dataset="folder", path=f"/{text}").settings
    assert settings.data.reader.values["path"] == f"/{text}"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (np.bool_(False), False),
        (3, 3),
        (np.int64(3), 3),
        (np.float64(1e-7), 1e-7),
        (np.float32(0.1), float(np.float32(0.1))),
        (float("inf"), float("inf")),
        ((1, "b"), [1, "b"]),
        (np.array([1, 2]), [1, 2]),
        (range(2), [0, 1]),
        ([None, {"a": np.int8(1)}], [None, {"a": 1}]),
        (Path("a b"), "a b"),
    ],
    ids=repr,
)
def test_values_are_kept(value, expected):
    (override,) = parse(to_overrides([], {"group__key": value}))
    assert override.key_or_group == "group.key"
    assert override.value() == expected
    assert type(override.value()) is type(expected)


def test_a_mapping_sets_several_settings():
    assert to_overrides(["a=0"], {"a": {"b": 1, "c": {"d": True}}}) == ["a=0", "a.b=1", "a.c.d=true"]
    with pytest.raises(fedssl.InputError, match=r"there is no setting 'partition\.alfa'; did you mean partition.alpha"):
        fedssl.compose(partition={"alfa": 1})


@pytest.mark.parametrize(
    ("texts", "settings", "sentence"),
    [
        ([], {"rounds": object()}, "rounds has the type object; set a text, a number, True"),
        ([], {"rounds": b"5"}, "rounds has the type bytes"),
        ([], {"output_dir": ""}, "output_dir is empty; set a value, or None"),
        ([5], {}, "5 is not a text such as 'rounds=5'; give values by keyword"),
        (["-m", "seed=0"], {}, "-m is a flag of the command line"),
        (["seed=0,1"], {}, "seed=0,1 has several values; call fedssl.run in a loop"),
        ([], {"sweep__jobs": 2}, "sweep.jobs=2 is an option of the command line's sweeps and runs; leave it out"),
        (["++hydra.sweep.dir=x"], {}, r"\+\+hydra.sweep.dir=x is an option"),
        (["rounds"], {}, "rounds does not have the form key=value"),
    ],
)
def test_other_input_is_rejected(texts, settings, sentence):
    with pytest.raises(fedssl.InputError, match=sentence):
        to_overrides(texts, settings)

"""How layers travel: exactness, error bounds by a slow transcription, and what is refused of what arrives."""

import json
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedssl.config.constraint_table import WIRE_DTYPES
from fedssl.wire.wire_format import MAX_TABLE_BYTES, SCALES, TABLE, WEIGHTS, flat_layout, pack, tensor_specs, unpack
from tests.arrays import same_bits

SHORT = [wire_dtype for wire_dtype in WIRE_DTYPES if wire_dtype != "fp32"]

LAYERS = {
    "encoder.conv.weight": np.linspace(-1, 2, 24, dtype=np.float32).reshape(3, 2, 2, 2),
    "encoder.bn.weight": np.array([1.0, 1.1, 0.9], dtype=np.float32),
    "encoder.bn.running_var": np.array([1e-8, 3.3, 1e30], dtype=np.float32),
    "encoder.bn.num_batches_tracked": np.array(7, dtype=np.int64),
    "encoder.prototypes.running_mean": np.full((2, 3), 1 / 3, dtype=np.float32),
    "projector.weight": np.linspace(5, 6, 6, dtype=np.float32).reshape(2, 3),
    "projector.table": np.full((2, 3), 1 / 3, dtype=np.float64),
    "projector.empty": np.zeros((0, 3), dtype=np.float32),
}
KERNELS = ("encoder.conv.weight", "projector.weight")

finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
matrices = arrays.arrays(np.float32, arrays.array_shapes(min_dims=2, max_dims=4, max_side=5), elements=finite)


def bits(array):
    return array.dtype, array.shape, array.tobytes()


def back(layers, wire_dtype, start=None):
    return unpack(pack(layers, wire_dtype, start=start), wire_dtype, start=start)


def scales_of(array):
    """Of int8, by the definition: an eighth bit for the sign, one scale per index of the first axis."""
    rows = np.abs(array.astype(np.float64)).reshape(len(array), -1)
    return (rows.max(axis=1) / 127).reshape(-1, *[1] * (array.ndim - 1))


def test_fp32_is_exact_and_reads_arrays_in_place():
    packed = pack(LAYERS, "fp32")
    assert list(packed) == [TABLE, "float32", "int64", "float64"]
    odd = np.array([[-0.0, np.nan, np.inf, 1e-45]], dtype=np.float32)
    assert same_bits(back({**LAYERS, "odd": odd}, "fp32"), {**LAYERS, "odd": odd})
    assert same_bits(back(LAYERS, "fp32", start=LAYERS), LAYERS)  # no differences: they would round
    assert np.shares_memory(unpack(packed, "fp32")["projector.weight"], packed["float32"])
    assert pack({}, "fp32") == {} == unpack({}, "int8")


@pytest.mark.parametrize("wire_dtype", SHORT)
def test_only_kernels_and_matrices_are_shortened(wire_dtype):
    there = back(LAYERS, wire_dtype, start=LAYERS)
    assert list(there) == list(LAYERS)
    for name, array in LAYERS.items():
        assert (there[name].dtype, there[name].shape) == (array.dtype, array.shape)
        if name not in KERNELS:
            assert bits(there[name]) == bits(array)
    numbers = sum(LAYERS[name].size for name in KERNELS)
    sizes = {
        key: (dtype.itemsize, count) for key, (dtype, count) in flat_layout(tensor_specs(LAYERS), wire_dtype).items()
    }
    assert sizes[WEIGHTS] == (1 if wire_dtype == "int8" else 2, numbers)
    assert sizes.get(SCALES) == ((4, 3 + 2) if wire_dtype == "int8" else None)


@given(matrices)
def test_int8_errs_by_half_a_step_per_channel(array):
    there = back({"w": array}, "int8")["w"]
    step = scales_of(array)
    # Quotient and product are float32: each is off by 2^-24 of 127 steps at most.
    allowed = step / 2 + step * 2 * 127 * 2.0**-24
    # Channels whose step is no normal float32 become zero.
    allowed = np.where(step < 1.18e-38, np.abs(array.astype(np.float64)).max(), allowed)
    assert np.all(np.abs(array.astype(np.float64) - there) <= allowed)
    packed = pack({"w": array}, "int8")
    assert np.abs(packed[WEIGHTS].astype(int)).max() <= 127
    assert same_bits(pack({"w": array.copy()}, "int8"), packed)


def test_int8_by_hand():
    # Channel 0: s = 2.54 / 127 = 0.02, 0.31 / 0.02 = 15.5 rounds to the even 16; channel 1: s = 1, 0.5 rounds to 0.
    array = np.array([[2.54, 0.31, -0.011], [-127, 0.5, 1.5], [0, 0, 0]], dtype=np.float32)
    packed = pack({"w": array}, "int8")
    assert packed[SCALES].tolist() == [np.float32(2.54) / np.float32(127), 1.0, 0.0]
    assert packed[WEIGHTS].reshape(3, 3)[1:].tolist() == [[-127, 0, 2], [0, 0, 0]]
    assert packed[WEIGHTS][0] == 127
    assert packed[WEIGHTS][2] == -1
    assert packed[WEIGHTS][1] in (15, 16)  # 15.5 but for the rounding of 2.54 and 0.31


@pytest.mark.parametrize(
    ("wire_dtype", "relative", "smallest"), [("fp16", 2.0**-11, 2.0**-25), ("bf16", 2.0**-8, 1e-40)]
)
@given(matrices)
def test_halves_err_by_half_a_unit_and_stay_finite(wire_dtype, relative, smallest, array):
    there = back({"w": array}, wire_dtype)["w"]
    largest = {"fp16": 65504.0, "bf16": 3.3895313892515355e38}[wire_dtype]
    clipped = np.clip(array.astype(np.float64), -largest, largest)
    assert np.all(np.isfinite(there))
    assert np.all(np.abs(clipped - there) <= relative * np.abs(clipped) + smallest)
    assert same_bits(back({"w": there}, wire_dtype), {"w": there})  # rounding again changes nothing


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_int8_refuses_what_is_not_finite(bad):
    with pytest.raises(ValueError, match="layer w has non-finite values, which wire_dtype=int8 cannot represent"):
        pack({"w": np.array([[1.0, bad]], dtype=np.float32)}, "int8")


@given(matrices.filter(lambda array: np.abs(array).max() < 1e30), st.floats(0, 0.01), st.integers(0, 9))
def test_a_difference_errs_by_its_own_size(array, size, seed):
    change = np.random.default_rng(seed).normal(size=array.shape) * size
    new = (array + change * np.abs(array).max()).astype(np.float32)
    there = back({"w": new}, "int8", start={"w": array})["w"]
    step = scales_of(new - array)
    rounding = 2.0**-23 * (np.abs(array).astype(np.float64) + np.abs(new)) + 1e-36
    assert np.all(np.abs(new.astype(np.float64) - there) <= step * 0.50002 + rounding)


def table(wire_dtype, *lines):
    return np.frombuffer(json.dumps([wire_dtype, lines]).encode(), np.uint8)


F4 = np.arange(4, dtype=np.float32)
W = ["w", "float32", [2, 2]]
GOOD = {WEIGHTS: np.array([1, 2, 3, 4], dtype=np.int8), SCALES: np.ones(2, dtype=np.float32)}


@pytest.mark.parametrize(
    ("arrived", "wire_dtype", "reason"),
    [
        ({"float32": F4}, "fp32", "the table of layers is missing"),
        ({TABLE: F4, "float32": F4}, "fp32", "the table of layers is missing"),
        ({TABLE: np.zeros(MAX_TABLE_BYTES + 1, dtype=np.uint8)}, "fp32", "the table of layers has 1048577 bytes"),
        ({TABLE: np.frombuffer(b"[" * 100_000, np.uint8)}, "fp32", "the table of layers is damaged"),
        ({TABLE: np.frombuffer(b"\xff\xfe", np.uint8)}, "fp32", "the table of layers is damaged"),
        ({TABLE: table("fp32", 7)}, "fp32", "the table of layers is damaged"),
        ({TABLE: table("fp32", ["w", "object", [2, 2]]), "float32": F4}, "fp32", "the table of layers is damaged"),
        ({TABLE: table("fp32", ["w", ["float32"], [2, 2]]), "float32": F4}, "fp32", "the table of layers is damaged"),
        ({TABLE: table("fp32", ["w\n", "float32", [4]]), "float32": F4}, "fp32", "the table of layers is damaged"),
        ({TABLE: table("fp32", ["w", "float32", [-2, -2]]), "float32": F4}, "fp32", "the table of layers is damaged"),
        ({TABLE: table("fp32", ["w", "float32", [True, 4]]), "float32": F4}, "fp32", "the table of layers is damaged"),
        ({TABLE: table("fp32", ["w", "float32", [1] * 17]), "float32": F4}, "fp32", "the table of layers is damaged"),
        ({TABLE: table("fp32", ["w", "float32", [2**40]]), "float32": F4}, "fp32", "the table of layers is damaged"),
        ({TABLE: table("fp32", W, W), "float32": F4}, "fp32", "names a layer twice"),
        ({TABLE: table("fp32", W), "float32": F4}, "int8", "layers have wire_dtype=fp32 instead of int8"),
        ({TABLE: table("int8", W), **GOOD}, "fp32", "layers have wire_dtype=int8 instead of fp32"),
        (
            {TABLE: table("fp32", ["w", "float32", [2**30, 2**30]]), "float32": F4},
            "fp32",
            r"array float32 has float32 of shape \(4,\) instead of 1152921504606846976 float32",
        ),
        ({TABLE: table("fp32", W), "float32": F4[:3]}, "fp32", "instead of 4 float32"),
        ({TABLE: table("fp32", W), "float32": F4.reshape(2, 2)}, "fp32", r"of shape \(2, 2\) instead of 4"),
        ({TABLE: table("fp32", W), "float32": F4.astype(">f4")}, "fp32", "has >f4"),
        ({TABLE: table("fp32", W), "float32": F4.astype(np.float64)}, "fp32", "has float64"),
        ({TABLE: table("fp32", W)}, "fp32", "array float32 is missing"),
        ({TABLE: table("fp32", W), "float32": F4, "x": F4}, "fp32", "array x is not in the table of layers"),
        ({TABLE: table("int8", W), WEIGHTS: GOOD[WEIGHTS]}, "int8", "array scales is missing"),
        ({TABLE: table("int8", W), WEIGHTS: F4, SCALES: GOOD[SCALES]}, "int8", "array weights has float32"),
        ({TABLE: table("fp16", W), WEIGHTS: GOOD[WEIGHTS].astype(np.int16)}, "fp16", "array weights has int16"),
        *(
            (
                {TABLE: table("int8", W), **GOOD, SCALES: np.array([1, bad], dtype=np.float32)},
                "int8",
                "array scales has values that are negative, not finite or far too large",
            )
            for bad in (np.nan, np.inf, -1.0, 3e38)
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_taken(arrived, wire_dtype, reason):
    tracemalloc.start()
    with pytest.raises(ValueError, match=reason):
        unpack(arrived, wire_dtype)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000  # lists in lists before Python 3.14 reports a recursion


lines = st.lists(
    st.tuples(
        st.sampled_from(["w", "v", "running_var", "x.running_var"]) | st.text(max_size=3),
        st.sampled_from(["float32", "int64", "int8", "float16", "weights", "bfloat16"]) | st.none(),
        st.lists(st.integers(-1, 5) | st.integers() | st.floats(), max_size=3) | st.none(),
    ),
    max_size=3,
)
flats = st.dictionaries(
    st.sampled_from([WEIGHTS, SCALES, "float32", "int64", "int8"]),
    arrays.arrays(st.sampled_from(["f4", "i1", "i8", "i2", "f2"]), arrays.array_shapes(max_dims=2, max_side=9)),
    max_size=3,
)


@settings(max_examples=40)
@given(st.sampled_from(WIRE_DTYPES), st.sampled_from(WIRE_DTYPES), lines, flats)
def test_whatever_arrives_layers_or_a_sentence_come_out(announced, wire_dtype, lines, flats):
    there = {TABLE: table(announced, *lines), **flats}
    with suppress(ValueError):
        layers = unpack(there, wire_dtype)
        assert sum(array.nbytes for array in layers.values()) <= 4 * sum(array.nbytes for array in flats.values())

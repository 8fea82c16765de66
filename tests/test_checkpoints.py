"""Settings are checked in form, and names are found in the model."""

from typing import Any

import keras
import pytest

from keras_ckpt import make_plan
from keras_ckpt.checkpoints import check_setting, describe, find_cuts, marker_cuts
from keras_ckpt.graph import linearise
from keras_ckpt.marker import CheckpointMarker
from keras_ckpt.plan import Plan


@pytest.mark.parametrize("setting", [None, False, 3, "memory", "sqrt", Plan("m", "x", (), ())])
def test_a_setting_of_a_known_form_passes(setting: Any) -> None:
    assert check_setting(setting) is setting


def test_layers_and_their_outputs_become_names() -> None:
    inputs = keras.Input((4,))
    shared = keras.layers.Dense(4, name="shared")
    first = shared(inputs)
    second = shared(first)
    head = keras.layers.Dense(1, name="head")
    linear = linearise(keras.Model(inputs, head(second)))
    names = check_setting([head, "head", first, second], model=linear)
    assert names == ("head", "head", "shared#1", "shared#2")
    assert find_cuts(names[2:3], linear) == [1]
    assert find_cuts(names[3:4], linear) == [2]
    assert find_cuts(["shared"], linear) == [1, 2]
    with pytest.raises(ValueError, match="not the output of a step"):
        check_setting([keras.Input((1,))], model=linear)
    with pytest.raises(TypeError, match="lists 5"):
        check_setting([5])


def test_a_limit_goes_with_budget_alone() -> None:
    assert check_setting("budget", "1GB") == "budget"
    with pytest.raises(ValueError, match="needs a `memory_limit`"):
        check_setting("budget")


def test_settings_are_described_in_words() -> None:
    settings = (("a", "b"), ("a",), 3, "sqrt", False)
    assert [describe(x) for x in settings] == [
        "at 2 named layers",
        "at 1 named layer",
        "3 equal segments",
        "sqrt",
        "False",
    ]


def test_markers_are_found_in_nested_models() -> None:
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), CheckpointMarker()])
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inner(inner(inputs))))
    assert marker_cuts(linearise(model)) == [2, 4]


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("inner", [3, 6]),
        ("b", [2, 5]),
        ("inner#2/b", [5]),
        ("head", [7]),
    ],
)
def test_layers_of_nested_models_are_found(name: str, cuts: list[int]) -> None:
    """C34: by their own name, their whole path, or that of the model around them."""
    layers = [keras.layers.Dense(4, name=letter) for letter in "abc"]
    inner = keras.Sequential([keras.Input((4,)), *layers], name="inner")
    inputs = keras.Input((4,))
    outputs = keras.layers.Dense(1, name="head")(inner(inner(inputs)))
    assert find_cuts([name], linearise(keras.Model(inputs, outputs))) == cuts


def test_an_ambiguous_name_is_refused_with_the_choices() -> None:
    first, second = (
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="dense")], name=name)
        for name in ("first", "second")
    )
    inputs = keras.Input((4,))
    model = keras.Model(inputs, second(first(inputs)))
    with pytest.raises(ValueError, match="Say which: 'first/dense', 'second/dense'"):
        make_plan(model, checkpoints=["dense"])

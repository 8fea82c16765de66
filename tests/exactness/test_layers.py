"""Every layer of `keras.layers` trains as in plain Keras.

The layers stand in chains: before each one something that trains, after it something that sums it
up and changes what the next one sees, so that an error anywhere shows in the loss and in the
weights before it.

Fewer than twelve combinations: one setting per execution. The whole matrix of settings is in
test_models.py. XLA compiles neither lookups and text nor most of the augmentations, and takes
its time, so that only the layers over features and sequences are compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import keras
import numpy as np
import pytest

from tests.exactness import layer_recipes as recipes
from tests.exactness.compare import Case, check, integers, uniform
from tests.exactness.layer_recipes import Recipe

CHAIN_LENGTH = 12
TARGETS = uniform(8, 1, seed=9)
KINDS: dict[str, tuple[dict[str, Recipe], np.ndarray]] = {
    "features": (recipes.FEATURES, uniform(8, 6)),
    "sequences": (recipes.SEQUENCES, uniform(8, 6, 4)),
    "recurrent": (recipes.RECURRENT, uniform(8, 4, 3)),
    "images": (recipes.IMAGES, uniform(8, 7, 7, 3)),
    "volumes": (recipes.VOLUMES, uniform(8, 4, 4, 4, 2)),
    "tokens": (recipes.TOKENS, integers(9, 8, 6)),
    "text": (recipes.TEXT, recipes.WORDS),
    "augmentations": (recipes.AUGMENTATIONS, 0.5 + uniform(8, 6, 6, 3) / 2),
    "signals": (recipes.SIGNALS, uniform(8, 32)),
}
TRAINABLE_INPUT = ("features", "sequences", "recurrent", "images", "volumes", "signals")
XLA = ("features", "sequences")


def chain(names: Sequence[str], kind: str) -> keras.Model:
    calls, data = KINDS[kind]
    inputs = keras.Input(data.shape[1:], dtype="string" if kind == "text" else data.dtype.name)
    total = None
    for name in names:
        x = inputs
        if kind in TRAINABLE_INPUT:
            x = keras.layers.Dense(x.shape[-1], "tanh")(x)
            # What came before shifts what this layer sees.
            if total is not None:
                x = x + keras.ops.reshape(total, (-1,) + (1,) * (len(x.shape) - 1))
        x = keras.ops.cast(calls[name](x), "float32")
        x = keras.layers.Dense(1, "tanh")(keras.layers.Flatten()(x))
        total = x if total is None else total + x
    return keras.Model(inputs, total)


def chains() -> dict[str, tuple[str, list[str]]]:
    found = {}
    for kind, (calls, _) in KINDS.items():
        names = iter(calls)
        while part := list(islice(names, CHAIN_LENGTH)):
            found[f"{kind}-{part[0]}-{part[-1]}"] = (kind, part)
    return found


CHAINS = chains()
CASES = {
    label: Case(
        lambda names=names, kind=kind: chain(names, kind),
        KINDS[kind][1],
        TARGETS,
        fit={"epochs": 1},
    )
    for label, (kind, names) in CHAINS.items()
}


@pytest.mark.parametrize("label", CASES)
@pytest.mark.parametrize(("execution", "setting"), [("graph", 3), ("eager", "nested")])
def test_layers_train_the_same(label: str, execution: str, setting: Any) -> None:
    check(CASES[label], execution, setting)


@pytest.mark.parametrize("label", [x for x, (kind, _) in CHAINS.items() if kind in XLA])
def test_layers_train_the_same_under_xla(label: str) -> None:
    check(CASES[label], "jit", "sqrt")


def names_of_layers() -> dict[type, set[str]]:
    """The layers that Keras has, each with all of its names."""
    exported = {name: getattr(keras.layers, name) for name in dir(keras.layers)}
    names: dict[type, set[str]] = {}
    for name, x in exported.items():
        if isinstance(x, type) and issubclass(x, keras.layers.Layer):
            names.setdefault(x, set()).add(name)
    return names


def test_every_layer_of_keras_is_covered() -> None:
    known = set(recipes.EXCLUDED).union(*(calls for calls, _ in KINDS.values()))
    layers = names_of_layers()
    assert [names for names in layers.values() if not names & known] == []
    assert known <= set().union(*layers.values())


@pytest.mark.parametrize("label", CASES)
def test_recipes_call_the_layer_that_they_are_named_after(label: str) -> None:
    layers = CASES[label].build()._flatten_layers()
    for name in CHAINS[label][1]:
        assert any(type(x) is getattr(keras.layers, name) for x in layers), name

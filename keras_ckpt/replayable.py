"""Finds steps that cannot be recomputed, because of where they update their state.

A recomputed segment starts from the state that it had in the forward pass. That needs to see the
update of each variable, and an update inside a TensorFlow loop or `tf.function` (Dropout in the
cell of an RNN, say) happens in a graph of its own, step of the loop by step. Nor are variables
and random numbers of TensorFlow's own seen, which do not go through Keras. A layer that uses
these is left out of every segment and runs once, as in plain Keras.
"""

from __future__ import annotations

import re
from typing import Any

import keras
import tensorflow as tf

from keras_ckpt import keras_internals
from keras_ckpt.graph import LinearModel, Step

_OWN_CODE = ("keras.src.", "keras_ckpt.")
_RAW_STATE = re.compile(
    "Assign.*VariableOp|Random.*|Multinomial|.*TruncatedNormal|Rng.*|Stateful(Uniform|Random|"
    "StandardNormal|TruncatedNormal).*"
)


def steps_to_run_once(linear: LinearModel) -> frozenset[int]:
    """The indices of the steps whose state cannot be replayed. Nothing runs, nothing changes."""
    suspects = [i for i, step in enumerate(linear.steps) if _has_state(step)]
    if not suspects:
        return frozenset()
    return keras_internals.run_isolated(
        lambda: frozenset(i for i in suspects if _updates_inside(linear, linear.steps[i]))
    )


def _has_state(step: Step) -> bool:
    """Whether a step may change more than its results: it has state, or a user's code."""
    if step.layer is None:
        return False
    return bool(step.layer.non_trainable_variables) or any(
        isinstance(layer, keras.layers.Lambda) or not type(layer).__module__.startswith(_OWN_CODE)
        for layer in keras_internals.flatten_layers(step.layer)
    )


def _updates_inside(linear: LinearModel, step: Step) -> bool:
    graph = keras_internals.scratch_graph()
    with graph.as_default():
        values = {t: _placeholder(linear.tensors[t]) for t in step.inputs}
        probe = _Probe()
        try:
            with probe:
                step.run(values, {"training": True})
        except Exception:  # Whatever a layer's own code may raise; the first pass will say it.
            return probe.found
    return probe.found or _changes_raw_state(graph)


def _changes_raw_state(graph: tf.Graph) -> bool:
    """Whether TensorFlow's own variables or random numbers are used, which no scope replays."""
    return any(
        _RAW_STATE.fullmatch(op.type)
        or any(_changes_raw_state(inner) for inner in keras_internals.called_graphs(op))
        for op in graph.get_operations()
    )


def _placeholder(tensor: keras.KerasTensor) -> tf.Tensor:
    return tf.compat.v1.placeholder(tensor.dtype, tensor.shape)


class _Probe(keras.StatelessScope):
    """Notes whether a variable is updated in another graph than the one that it starts in."""

    def __init__(self) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._graph = tf.compat.v1.get_default_graph()
        self.found = False

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Keeps the update to itself, unless its value belongs to an inner graph."""
        if tf.compat.v1.get_default_graph() is self._graph:
            super().add_update(update)
        else:
            self.found = True

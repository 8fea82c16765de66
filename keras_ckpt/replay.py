"""Running a function twice from the same state, with one update.

Keras reads and assigns a variable through the stateless scope that is active, if any. Two scopes
use this: the first lets everything happen as without a scope and notes what non-trainable
variables held before; the second answers from these notes and keeps updates to itself.

A trainable weight is read from its variable in both passes, so that the tape sees it. Only one
that the function itself assigns (SpectralNormalization's kernel) is replayed too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import keras
import tensorflow as tf

from keras_ckpt import keras_internals

State = list[tuple[keras.Variable, tf.Tensor]]


class FirstPass(keras.StatelessScope):
    """Runs as if no scope were there, and notes the state that the function started from.

    Raises:
        ValueError: on exit, if variables were created inside; at once, if a variable is updated
            inside a TensorFlow loop or function within the pass.
    """

    def __init__(self) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._before: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        self._updated: set[int] = set()
        self._graph = _current_graph()
        self._created_before = keras_internals.uninitialized_variables()

    @property
    def state_before(self) -> State:
        """The variables that were read or updated, with their values before the pass."""
        return list(self._before.values())

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """The variable's value, or None to let Keras read the variable itself."""
        if variable.trainable or id(variable) in self._updated:
            return self._outer_value(variable)
        return self._note(variable)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Performs the update where it would happen without this scope."""
        variable, value = update
        if _current_graph() is not self._graph:
            raise ValueError(
                f"Variable '{variable.path}' is updated inside a TensorFlow loop or tf.function "
                "within a recomputed function, where its update cannot be replayed. Leave the "
                "layer that owns it out of the recomputed part."
            )
        self._note(variable)
        self._updated.add(id(variable))
        if self.original_scope is not None:
            self.original_scope.add_update(update)
        else:
            keras_internals.assign_variable(variable, value)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        known = {id(variable) for variable in self._created_before}
        created = [v for v in keras_internals.uninitialized_variables() if id(v) not in known]
        if not created:
            return
        keras_internals.forget_uninitialized_variables(created)
        if exception[0] is None:
            names = ", ".join(f"'{variable.path}'" for variable in created)
            raise ValueError(
                f"The recomputed function creates the variables {names}: their layer would be made "
                "anew in each pass. Create the layer outside, for example in `__init__`, and "
                "build it before."
            )

    def _note(self, variable: keras.Variable) -> tf.Tensor | None:
        if keras_internals.stored_variable(variable) is None:
            return None
        if id(variable) not in self._before:
            value = self._outer_value(variable)
            if value is None:
                with _inside(self._graph):
                    value = keras_internals.read_variable(variable)
            self._before[id(variable)] = (variable, value)
        return self._before[id(variable)][1]

    def _outer_value(self, variable: keras.Variable) -> tf.Tensor | None:
        if self.original_scope is None:
            return None
        return self.original_scope.get_current_value(variable)


class SecondPass(keras.StatelessScope):
    """Starts from a noted state, and keeps all updates to itself."""

    def __init__(self, state: Sequence[tuple[keras.Variable, tf.Tensor]]) -> None:
        super().__init__(state, collect_losses=True, initialize_variables=False)

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """The replayed value, or None to let Keras read the variable itself."""
        value = super().get_current_value(variable)
        if value is None or not variable.trainable:
            return value
        # The value of then, with the gradient of the variable: an assignment stops no gradient.
        weight = tf.convert_to_tensor(keras_internals.stored_variable(variable))
        return tf.stop_gradient(value) + (weight - tf.stop_gradient(weight))


def _current_graph() -> tf.Graph | None:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _inside(graph: tf.Graph | None) -> contextlib.AbstractContextManager[object]:
    return tf.init_scope() if graph is None else graph.as_default()

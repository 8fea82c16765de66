"""The layer with which a user says: keep this tensor."""

from __future__ import annotations

from typing import Any

import keras


@keras.saving.register_keras_serializable(package="keras_ckpt")
class CheckpointMarker(keras.layers.Layer):
    """Marks tensors as checkpoints: they are kept, and what lies between is recomputed.

    An identity layer: shapes, masks and values pass unchanged, and it has no weights. It takes
    effect in a `CheckpointedModel` with `checkpoints="collection"`, the default of a model that
    holds a marker; anywhere else it does nothing.

    Args:
        **kwargs: as for any `keras.layers.Layer`.

    Example:

    >>> inputs = keras.Input((16,))
    >>> x = keras.layers.Dense(64, activation="gelu")(inputs)
    >>> x = CheckpointMarker()(x)
    >>> outputs = keras.layers.Dense(1)(x)
    """

    def __init__(self, **kwargs: Any) -> None:
        # A cast here would keep another tensor than the one that the user named.
        kwargs.setdefault("autocast", False)
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, inputs: Any) -> Any:
        """Returns its input: one tensor, or any nested structure of tensors."""
        return inputs

    def compute_output_spec(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The shapes and dtypes of its input."""
        return keras.tree.map_structure(
            lambda x: keras.KerasTensor(x.shape, x.dtype, sparse=x.sparse), inputs
        )

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The shapes of its input."""
        return input_shape

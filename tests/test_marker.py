"""A marker is an identity layer, in any model."""

import keras
import numpy as np
import tensorflow as tf

from keras_ckpt import CheckpointMarker


def test_it_passes_values_masks_and_structures_unchanged() -> None:
    marker = CheckpointMarker()
    x = keras.layers.Embedding(4, 2, mask_zero=True)(tf.constant([[1, 0]]))
    assert marker(x) is x
    assert marker({"a": x, "b": [x, x]})["b"][1] is x


def test_it_marks_several_tensors_of_any_dtype_symbolically() -> None:
    inputs = {"ids": keras.Input((3,), dtype="int32"), "x": keras.Input((3,), dtype="float64")}
    outputs = CheckpointMarker(dtype="mixed_float16")(inputs)
    assert {name: (x.shape, x.dtype) for name, x in outputs.items()} == {
        "ids": ((None, 3), "int32"),
        "x": ((None, 3), "float64"),
    }


def test_a_plain_model_with_markers_is_saved_and_loads(tmp_path: object) -> None:
    inputs = keras.Input((3,))
    model = keras.Model(inputs, CheckpointMarker()(keras.layers.Dense(2)(inputs)))
    model.save(f"{tmp_path}/model.keras")
    loaded = keras.saving.load_model(f"{tmp_path}/model.keras")
    x = np.ones((1, 3))
    np.testing.assert_array_equal(loaded(x), model(x))

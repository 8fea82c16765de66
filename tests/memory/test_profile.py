import random
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ckpt.memory import profile
from tests.memory.models import checkpointed, compiled, data, plain

KIB = 2**10
MODES = ["graph", "xla", "eager"]


def chain_of_known_size(mode):
    """20 activations of 1 MiB each, every one of which is its own residual."""
    inputs = x = keras.Input((256,))
    x = keras.layers.Dense(256, use_bias=False)(x)
    for _ in range(20):
        x = keras.layers.Activation("tanh")(x)
    return compiled(keras.Model(inputs, x), mode, "sgd")


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("timeline", [True, False])
def test_profiling_adds_no_memory_of_its_own(mode, timeline):
    report = profile(chain_of_known_size(mode), batch_size=1024, timeline=timeline)
    # 20 outputs of tanh; the loss adds at most 4: the difference, its square, two gradients.
    # Dense's output is not kept. The weights' gradient is 256 KiB.
    assert 20 * 1024 * KIB <= report.peak_bytes <= (24 * 1024 + 512) * KIB


def agree(readings):
    middle = sorted(readings)[len(readings) // 2]
    return min(readings) > 0 and all(abs(x - middle) <= 0.05 * middle for x in readings)


@pytest.mark.parametrize("mode", ["xla", "eager"])
def test_five_steps_agree(mode):
    report = profile(checkpointed(mode), batch_size=4096, steps=5, timeline=False)
    assert report.steps == len(report.step_peaks) == 5
    assert agree(report.step_peaks)
    assert report.peak_bytes in report.step_peaks


def test_five_repeats_agree():
    model = plain(layers=36)
    assert agree([profile(model, batch_size=4096, timeline=False).peak_bytes for _ in range(5)])


def test_repeats_under_a_plan_differ_by_one_tensor_at_most():
    # Operations run at the same time, and one activation is 7 % of this peak.
    model = checkpointed(layers=36, checkpoints=6)
    readings = [profile(model, batch_size=4096, timeline=False).peak_bytes for _ in range(3)]
    assert max(readings) - min(readings) <= 1.1 * 4096 * 64 * 4


@pytest.mark.parametrize("mode", MODES)
def test_saving_is_real(mode):
    reports = [
        profile(model, batch_size=4096, timeline=False)
        for model in (plain(mode, layers=36), checkpointed(mode, layers=36, checkpoints=6))
    ]
    assert reports[1].peak_bytes < 0.45 * reports[0].peak_bytes


def test_resting_memory_holds_weights_slots_and_data():
    x, y = data()
    report = profile(plain(), x, y, batch_size=1024)
    weights = 12 * (64 * 64 + 64) * 4
    assert report.batch_size == 1024
    assert report.resting_bytes >= 3 * weights + x.nbytes + y.nbytes


def everything_that_changes(model):
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    return [keras.ops.convert_to_numpy(v) for v in variables] + [
        np.random.get_state()[1],  # noqa: NPY002
        random.getstate()[1],
        keras.random.uniform((2,)),
    ]


def model_with_state(mode):
    inputs = keras.Input((16,))
    x = keras.layers.Dense(32)(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.5)(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile("adam", "mse", metrics=["mae"], run_eagerly=mode == "eager")
    return model


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_training_goes_on_as_if_nothing_had_happened(mode):
    x, y = np.ones((64, 16), "float32"), np.ones((64, 1), "float32")
    states = []
    for with_profile in (False, True):
        keras.utils.set_random_seed(0)
        keras.random.uniform((2,))  # From here on the process-wide generator exists.
        model = model_with_state(mode)
        model.fit(x, y, batch_size=16, epochs=2, verbose=0)
        if with_profile:
            profile(model, x, y, batch_size=16)
        model.fit(x, y, batch_size=16, epochs=1, verbose=0)
        states.append(everything_that_changes(model))
    for without, with_profile in zip(*states, strict=True):
        np.testing.assert_array_equal(without, with_profile)


def test_profiling_before_fit_changes_nothing():
    x, y = np.ones((64, 16), "float32"), np.ones((64, 1), "float32")
    states = []
    for with_profile in (False, True):
        keras.utils.set_random_seed(0)
        model = model_with_state("graph")
        if with_profile:
            train_function = model.train_function
            profile(model, x, y, batch_size=16)
            assert model.train_function is train_function
        model.fit(x, y, batch_size=16, epochs=1, verbose=0)
        states.append(everything_that_changes(model))
    for without, with_profile in zip(*states, strict=True):
        np.testing.assert_array_equal(without, with_profile)


def test_an_error_in_a_step_leaves_the_model_as_it_was():
    model = plain()
    model.optimizer.build(model.trainable_variables)
    before = model.get_weights()
    calls = keras.Operation.__call__
    with pytest.raises(ValueError, match="cannot be trained on this data"):
        profile(model, *data(width=63))
    assert keras.Operation.__call__ is calls
    for value, value_now in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, value_now)


def test_random_data_fits_inputs_losses_and_vocabularies():
    words, image = keras.Input((7,), dtype="int32", name="words"), keras.Input((8, 8, 3))
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(2, 4)(words))
    y = keras.layers.GlobalAveragePooling2D()(image)
    merged = keras.layers.concatenate([x, y])
    outputs = [keras.layers.Dense(5, name="label")(merged), keras.layers.Dense(2)(merged)]
    model = keras.Model([words, image], outputs)
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", [sparse, "mse"])
    report = profile(model, batch_size=4, steps=1)
    assert report.batch_size == 4
    assert report.peak_bytes > 0


def test_data_that_comes_in_batches_keeps_its_size():
    dataset = tf.data.Dataset.from_tensor_slices(data()).batch(128)
    assert profile(plain(), dataset, steps=1).batch_size == 128


def test_a_subclassed_model_is_profiled_on_data():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = keras.layers.Dense(64, activation="tanh", name="first")
            self.second = keras.layers.Dense(64, name="second")

        def call(self, x):
            return self.second(self.first(x))

    report = profile(compiled(Model()), *data(), batch_size=256, steps=1)
    assert {"first", "second"} <= {row.step for row in report.timeline}
    with pytest.raises(ValueError, match="Give a batch"):
        profile(compiled(Model()))


def test_bad_input_is_refused():
    inputs = keras.Input((4,))
    with pytest.raises(ValueError, match=r"not compiled.*model.compile"):
        profile(keras.Model(inputs, keras.layers.Dense(1)(inputs)))
    with pytest.raises(ValueError, match="`steps` has to be 1 or more"):
        profile(plain(), steps=0)
    with pytest.raises(TypeError, match="needs a Keras model"):
        profile("model")
    x, y = data()
    with pytest.raises(ValueError, match=r"(?s)cannot be read.*as to `fit`"):
        profile(plain(), x, y[:-1])
    with pytest.raises(ValueError, match="cannot be trained on this data"):
        profile(plain(), x, y[:, :-1])


def test_weights_dominate_and_the_report_says_so():
    inputs = keras.Input((512,))
    model = compiled(keras.Model(inputs, keras.layers.Dense(4096)(inputs)), optimizer="sgd")
    report = profile(model, batch_size=1, steps=1, timeline=False)
    if report.peak_bytes < 0.2 * report.resting_bytes:
        assert "little to gain" in str(report)
    else:
        assert "little to gain" not in str(report)


def test_without_figures_it_says_what_to_set():
    program = (
        "import os; os.environ['TF_CPU_ALLOCATOR_USE_BFC'] = '0'\n"
        "import keras\n"
        "from keras_ckpt.memory import profile\n"
        "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])\n"
        "model.compile('sgd', 'mse')\n"
        "profile(model)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "TF_CPU_ALLOCATOR_USE_BFC=1 before TensorFlow is imported" in result.stderr

import keras
import pytest

from keras_ckpt.graph import linearise
from keras_ckpt.updates import UpdateCost, update_cost

optimizers = keras.optimizers


@pytest.mark.parametrize(
    ("optimizer", "ahead", "during"),
    [
        # The copy of the weight alone: the step is written over the gradient.
        (optimizers.SGD(), 0, 1),
        # `momentum * velocity` waits for the gradient.
        (optimizers.SGD(momentum=0.9), 1, 1),
        (optimizers.Adam(), 0, 2),
        # The weight decays before the gradient is there.
        (optimizers.AdamW(), 1, 1),
        (optimizers.Lion(), 2, 1),
    ],
)
def test_what_an_update_takes_in_sizes_of_the_weight(optimizer, ahead, during):
    cost = update_cost(optimizer)
    assert cost.ahead == pytest.approx(ahead, abs=0.01)
    assert cost.during == pytest.approx(during, abs=0.01)
    assert not optimizer.built
    assert optimizer.iterations.numpy() == 0


def test_a_model_that_is_not_compiled_updates_nothing():
    assert update_cost(None) == UpdateCost(0, 0)


def test_bytes_follow_the_trainable_weights():
    x = keras.Input((4,))
    frozen = keras.layers.Dense(8, trainable=False)
    model = keras.Model(x, frozen(keras.layers.Dense(4)(x)))
    cost = UpdateCost(ahead=1, during=2)
    first, second = linearise(model).steps
    assert cost.workspace(first) == 2 * 4 * 4 * 4
    assert cost.workspace(second) == 0
    assert cost.bytes_ahead(model) == (4 * 4 + 4) * 4

import keras
import pytest
import tensorflow as tf

from keras_ckpt import tracing
from keras_ckpt.costs import ModelCosts, StepCost
from keras_ckpt.graph import linearise
from keras_ckpt.tracing import trace_costs

layers = keras.layers
BATCH = 8
FLOAT = 4


def costs_of(model: keras.Model, batch_size: int = BATCH) -> ModelCosts:
    specs = [keras.KerasTensor((batch_size, *x.shape[1:]), x.dtype) for x in model.inputs]
    return trace_costs(linearise(model), specs, model)


def costs_of_layer(layer: keras.layers.Layer, *shape: int, dtype: str = "float32") -> StepCost:
    """The cost of a layer in the middle of a model: a gradient flows into its input, if it can."""
    x = h = keras.Input(shape, dtype=dtype)
    if dtype == "float32":
        h = layers.Rescaling(2.0)(layers.Dense(shape[-1])(x))
    return costs_of(keras.Model(x, layer(h))).steps[-1]


def sized(step: StepCost) -> dict[str, int]:
    return {
        "inputs": sum(s in step.inputs for s in step.saved),
        "outputs": sum(s in step.outputs for s in step.saved),
        "residual": step.residual_bytes,
    }


@pytest.mark.parametrize(
    ("layer", "inputs", "outputs", "residual"),
    [
        (layers.Dense(6), 1, 0, 0),
        (layers.Dense(6, activation="tanh"), 1, 1, 0),
        (layers.Dense(6, activation="relu"), 1, 1, 0),
        (layers.Dense(6, activation="gelu"), 1, 0, 3 * BATCH * 6 * FLOAT),
        (layers.ReLU(), 0, 1, 0),
        (layers.Dropout(0.5), 0, 0, BATCH * 4),  # one byte per element of the mask
        (layers.Dropout(0.0), 0, 0, 0),
        (layers.Rescaling(3.0), 0, 0, 0),
    ],
)
def test_saved_by_elementwise_and_dense_layers(layer, inputs, outputs, residual):
    step = costs_of_layer(layer, 4)
    assert sized(step) == {"inputs": inputs, "outputs": outputs, "residual": residual}


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (layers.Conv2D(5, 3, padding="same"), (8, 8, 3)),
        (layers.DepthwiseConv2D(3, padding="same"), (8, 8, 3)),
        (layers.Conv2DTranspose(5, 2), (8, 8, 3)),
        (layers.Conv1D(5, 3), (8, 3)),
    ],
)
def test_convolutions_save_their_input_alone(layer, shape):
    step = costs_of_layer(layer, *shape)
    assert sized(step) == {"inputs": 1, "outputs": 0, "residual": 0}
    assert step.expensive
    assert step.free_flops == step.forward_flops


def test_batch_normalization_saves_its_input_and_its_statistics():
    step = costs_of_layer(layers.BatchNormalization(), 8, 8, 3)
    assert sized(step)["inputs"] == 1
    assert sized(step)["outputs"] == 0
    assert 0 < step.residual_bytes <= 8 * 3 * FLOAT
    assert not step.expensive


def test_max_pooling_saves_both_sides():
    assert sized(costs_of_layer(layers.MaxPool2D(), 8, 8, 3)) == {
        "inputs": 1,
        "outputs": 1,
        "residual": 0,
    }


@pytest.mark.parametrize(
    "layer", [layers.Reshape((2, 6)), layers.Flatten(), layers.Identity(), layers.Dropout(0.0)]
)
def test_aliases_allocate_nothing(layer):
    step = costs_of_layer(layer, 3, 4)
    assert step.outputs == ()
    assert step.saved == ()
    assert step.forward_flops == 0


def test_a_tensor_saved_through_an_alias_is_the_one_behind_it():
    x = keras.Input((3, 4))
    h = layers.Dense(4)(x)
    costs = costs_of(keras.Model(x, layers.Dense(2)(layers.Flatten()(h))))
    assert costs.steps[2].saved == costs.steps[0].outputs


class Twice(layers.Layer):
    def call(self, x):
        y = x * 2.0
        return y, keras.ops.reshape(y, (-1, 2, 2))


def test_two_results_in_one_buffer_are_one_storage():
    x = keras.Input((4,))
    costs = costs_of(keras.Model(x, Twice()(x)))
    assert len(costs.steps[0].outputs) == len(costs.outputs) == 1


def test_products_are_counted_exactly():
    assert costs_of_layer(layers.Dense(6, use_bias=False), 4).forward_flops == 2 * BATCH * 4 * 6
    conv = costs_of_layer(layers.Conv2D(5, 3, padding="same", use_bias=False), 8, 8, 3)
    assert conv.forward_flops == 2 * BATCH * 8 * 8 * 5 * 3 * 3 * 3
    depthwise = costs_of_layer(layers.DepthwiseConv2D(3, padding="same", use_bias=False), 8, 8, 3)
    assert depthwise.forward_flops == 2 * BATCH * 8 * 8 * 3 * 3 * 3
    grouped = costs_of_layer(layers.Conv2D(4, 1, groups=2, use_bias=False), 8, 8, 6)
    assert grouped.forward_flops == 2 * BATCH * 8 * 8 * 4 * 3
    x = keras.Input((5, 7))
    outer = costs_of(keras.Model(x, keras.ops.einsum("btd,bsd->bts", x, x))).steps[-1]
    assert outer.forward_flops == 2 * BATCH * 5 * 5 * 7


def test_a_dense_layer_has_two_products_in_its_backward_pass():
    step = costs_of_layer(layers.Dense(6, use_bias=False), 4)
    assert step.backward_flops == 2 * step.forward_flops
    assert step.weight_gradient_bytes == 4 * 6 * FLOAT


def test_the_first_layer_needs_no_gradient_of_its_input():
    x = keras.Input((4,))
    costs = costs_of(keras.Model(x, layers.Dense(6, use_bias=False)(x)))
    assert costs.steps[0].backward_flops == costs.steps[0].forward_flops
    assert costs.differentiable == (False, True)


def test_what_a_loop_saves_grows_with_its_rounds():
    short, long = (costs_of_layer(layers.LSTM(6), n, 4) for n in (10, 20))
    assert short.expensive
    assert long.residual_bytes == pytest.approx(2 * short.residual_bytes, rel=0.05)
    # Gates i, f, o, candidate, tanh(c), the states h and c, and x_t, for each of 10 rounds.
    assert short.residual_bytes == pytest.approx(10 * BATCH * (7 * 6 + 4) * FLOAT, rel=0.05)
    assert long.forward_flops == pytest.approx(20 * 2 * BATCH * 10 * 24, rel=0.3)


def test_an_embedding_makes_a_sparse_gradient():
    step = costs_of_layer(layers.Embedding(1000, 16), 5, dtype="int32")
    assert step.weight_gradient_bytes < 1000 * 16 * FLOAT
    assert step.weight_gradient_bytes >= BATCH * 5 * 16 * FLOAT


def test_a_frozen_layer_does_not_save_its_input():
    frozen = layers.Dense(6)
    frozen.trainable = False
    step = costs_of_layer(frozen, 4)
    assert sized(step) == {"inputs": 0, "outputs": 0, "residual": 0}
    assert step.weight_gradient_bytes == 0


def test_nothing_is_saved_before_the_first_trainable_weight():
    x = keras.Input((4,))
    frozen = layers.Dense(4, activation="tanh", trainable=False)(x)
    costs = costs_of(keras.Model(x, layers.Dense(2)(frozen)))
    assert costs.steps[0].saved == ()
    assert costs.steps[0].backward_flops == 0
    assert costs.differentiable == (False, False, True)


def test_stop_gradient_ends_what_is_differentiable():
    x = keras.Input((4,))
    stopped = keras.ops.stop_gradient(layers.Dense(4)(x))
    costs = costs_of(keras.Model(x, layers.ReLU()(keras.ops.add(stopped, x))))
    assert costs.steps[-1].saved == ()
    assert not costs.differentiable[costs.outputs[0]]


def test_mixed_precision_saves_half_and_the_cast_weight():
    step = costs_of_layer(layers.Dense(6, dtype="mixed_float16"), 4)
    # The input is cast inside, so it is the cast that is saved, and so is the kernel's.
    assert sized(step) == {"inputs": 0, "outputs": 0, "residual": (BATCH * 4 + 4 * 6) * 2}


def test_a_mask_travels_on():
    x = keras.Input((5,), dtype="int32")
    h = layers.Embedding(10, 4, mask_zero=True)(x)
    masked = costs_of(keras.Model(x, layers.LSTM(3)(layers.Dropout(0.1)(h))))
    plain = costs_of(keras.Model(x, layers.LSTM(3)(layers.Embedding(10, 4)(x))))
    assert masked.steps[-1].residual_bytes > plain.steps[-1].residual_bytes


def test_losses_added_by_a_step_are_part_of_its_backward_pass():
    with_loss = costs_of_layer(layers.ActivityRegularization(l2=0.1), 4)
    assert with_loss.saved == with_loss.inputs


def test_resting_memory_holds_weights_slots_and_data():
    x = keras.Input((4,))
    model = keras.Model(x, layers.Dense(6)(x))
    weights, data = (4 * 6 + 6) * FLOAT, BATCH * 4 * FLOAT
    assert costs_of(model).resting_bytes == weights + data
    model.compile(keras.optimizers.Adam())
    estimate = costs_of(model).resting_bytes
    assert not model.optimizer.built
    assert estimate == pytest.approx(3 * weights + data, abs=32)
    model.optimizer.build(model.trainable_variables)
    assert costs_of(model).resting_bytes == estimate


def count_traces(monkeypatch) -> list[str]:
    traced: list[str] = []
    original = tracing.trace_step

    def counted(step, *args):
        traced.append(step.name)
        return original(step, *args)

    monkeypatch.setattr(tracing, "trace_step", counted)
    return traced


def test_steps_that_are_alike_are_traced_once(monkeypatch):
    traced = count_traces(monkeypatch)
    x = h = keras.Input((4,))
    for _ in range(20):
        h = layers.Dropout(0.1)(layers.Dense(4, activation="relu")(h))
    costs_of(keras.Model(x, h))
    # The first Dense has no gradient to make of its input.
    assert len(traced) == 3


@pytest.mark.parametrize(
    "other",
    [
        layers.Dense(4, activation="relu"),
        layers.Dense(4, use_bias=False),
        layers.Dense(4, trainable=False),
        layers.Dense(4, dtype="mixed_bfloat16"),
    ],
)
def test_steps_that_differ_are_not_taken_for_alike(monkeypatch, other):
    traced = count_traces(monkeypatch)
    x = keras.Input((4,))
    h = layers.Dense(4)(layers.Dense(4)(x))
    costs_of(keras.Model(x, other(h)))
    assert len(traced) == 3


def test_costs_are_cached_for_a_linearised_model(monkeypatch):
    traced = count_traces(monkeypatch)
    x = keras.Input((4,), batch_size=BATCH)
    model = keras.Model(x, layers.Dense(4)(x))
    linear = linearise(model)
    first = trace_costs(linear, [x], model)
    assert trace_costs(linear, [x], model) == first
    assert len(traced) == 1
    larger = trace_costs(linear, [keras.KerasTensor((2 * BATCH, 4))], model)
    assert larger.storage_bytes[1] == 2 * first.storage_bytes[1]
    model.trainable = False
    assert trace_costs(linear, [x], model).steps[0].saved == ()


def stateful_model() -> keras.Model:
    x = keras.Input((4,))
    h = layers.Dense(4, activity_regularizer="l2", kernel_regularizer="l2")(x)
    h = layers.BatchNormalization()(layers.Dropout(0.5, seed=3)(h))
    return keras.Model(x, h)


def test_the_model_is_left_as_it_was():
    model = stateful_model()
    model(tf.ones((2, 4)), training=True)
    keras.utils.set_random_seed(1)
    before = [v.numpy() for v in model.variables]
    losses = [float(loss) for loss in model.losses]
    costs_of(model)
    assert [float(loss) for loss in model.losses] == losses
    assert all((a == v.numpy()).all() for a, v in zip(before, model.variables, strict=True))
    drawn = keras.random.uniform((3,)).numpy()
    keras.utils.set_random_seed(1)
    assert (keras.random.uniform((3,)).numpy() == drawn).all()


def test_costs_can_be_traced_within_a_function_a_tape_and_a_layer_call():
    model = stateful_model()
    expected = costs_of(model)
    seen = []

    class Outer(layers.Layer):
        def call(self, x):
            seen.append(costs_of(model))
            return model(x, training=True)

    outer = Outer()

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(outer(x)) + sum(outer.losses)
        operations = len(tf.compat.v1.get_default_graph().get_operations())
        costs_of(model)
        assert len(tf.compat.v1.get_default_graph().get_operations()) == operations
        return tape.gradient(loss, model.trainable_weights[0].value)

    assert step(tf.ones((2, 4))) is not None
    assert seen
    assert all(costs == expected for costs in seen)


class Untraceable(layers.Layer):
    def call(self, x):
        if not tf.executing_eagerly() and not isinstance(x, keras.KerasTensor):
            raise RuntimeError("no graphs here")
        return x * 2.0

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def test_a_step_that_cannot_be_traced_saves_everything_and_says_so():
    x = keras.Input((4,))
    model = keras.Model(x, Untraceable(name="odd")(layers.Dense(4)(x)))
    with pytest.warns(UserWarning, match=r"(?s)'odd'.*no graphs here"):
        costs = costs_of(model)
    assert costs.steps[-1].saved == (*costs.steps[-1].inputs, *costs.steps[-1].outputs)
    assert costs.storage_bytes[costs.outputs[0]] == BATCH * 4 * FLOAT

import keras
import numpy as np

import keras_ckpt


def tanh_layers(layers=12, width=64):
    inputs = x = keras.Input((width,))
    for i in range(layers):
        x = keras.layers.Dense(width, activation="tanh", name=f"tanh_{i}")(x)
    return inputs, x


def plain(mode="graph", layers=12, width=64, optimizer="adam"):
    return compiled(keras.Model(*tanh_layers(layers, width), name="plain"), mode, optimizer)


def checkpointed(mode="graph", layers=12, width=64, checkpoints=4):
    layers = tanh_layers(layers, width)
    model = keras_ckpt.CheckpointedModel(*layers, checkpoints=checkpoints, name="checkpointed")
    return compiled(model, mode)


def compiled(model, mode="graph", optimizer="adam"):
    model.compile(
        optimizer=optimizer, loss="mse", run_eagerly=mode == "eager", jit_compile=mode == "xla"
    )
    return model


def data(examples=1024, width=64):
    random = np.random.default_rng(0)
    return random.random((examples, width), "float32"), random.random((examples, width), "float32")

"""A call of every layer in `keras.layers`, by the kind of tensor that it takes.

A recipe takes a tensor and returns what the layer makes of it. Its name is that of the class.
"""

# ruff: noqa: PLW0108 - a layer has to be made when it is called, with a seed of its own.

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import layers as L
from keras import ops

Recipe = Callable[[Any], Any]


def _saved_model() -> str:
    folder = tempfile.mkdtemp()
    model = keras.Sequential([keras.Input((6,)), L.Dense(6, trainable=False)])
    model.export(folder, verbose=False)
    return folder


FEATURES: dict[str, Recipe] = {
    "Activation": lambda x: L.Activation("gelu")(x),
    "ActivityRegularization": lambda x: L.ActivityRegularization(0.1, 0.1)(x),
    "Add": lambda x: L.Add()([x, x]),
    "AlphaDropout": lambda x: L.AlphaDropout(0.3)(x),
    "Average": lambda x: L.Average()([x, L.Dense(6)(x)]),
    "BatchNormalization": lambda x: L.BatchNormalization()(x),
    "Concatenate": lambda x: L.Concatenate()([x, L.Dense(2)(x)]),
    "Dense": lambda x: L.Dense(5, "tanh", kernel_regularizer="l2", activity_regularizer="l1")(x),
    "Dot": lambda x: L.Dot(1)([x, L.Dense(6)(x)]),
    "Dropout": lambda x: L.Dropout(0.3)(x),
    "ELU": lambda x: L.ELU()(x),
    "Flatten": lambda x: L.Flatten()(x),
    "GaussianDropout": lambda x: L.GaussianDropout(0.3)(x),
    "GaussianNoise": lambda x: L.GaussianNoise(0.3)(x),
    "Identity": lambda x: L.Identity()(x),
    "Lambda": lambda x: L.Lambda(lambda x: 2 * x, output_shape=(6,))(x),
    "LayerNormalization": lambda x: L.LayerNormalization()(x),
    "LeakyReLU": lambda x: L.LeakyReLU()(x),
    "Maximum": lambda x: L.Maximum()([x, L.Dense(6)(x)]),
    "Minimum": lambda x: L.Minimum()([x, L.Dense(6)(x)]),
    "Multiply": lambda x: L.Multiply()([x, L.Dense(6)(x)]),
    "Normalization": lambda x: L.Normalization(mean=0.5, variance=2.0)(x),
    "PReLU": lambda x: L.PReLU(alpha_initializer="glorot_uniform")(x),
    "RMSNormalization": lambda x: L.RMSNormalization()(x),
    "ReLU": lambda x: L.ReLU(negative_slope=0.1)(x),
    "RepeatVector": lambda x: L.RepeatVector(2)(x),
    "Rescaling": lambda x: L.Rescaling(2.0, 1.0)(x),
    "Reshape": lambda x: L.Reshape((3, 2))(x),
    "Softmax": lambda x: L.Softmax()(x),
    "SpectralNormalization": lambda x: L.SpectralNormalization(L.Dense(6))(x),
    "Subtract": lambda x: L.Subtract()([x, L.Dense(6)(x)]),
    "TFSMLayer": lambda x: L.TFSMLayer(_saved_model(), call_endpoint="serve", trainable=False)(x),
    "UnitNormalization": lambda x: L.UnitNormalization()(x),
}

SEQUENCES: dict[str, Recipe] = {
    "AdaptiveAveragePooling1D": lambda x: L.AdaptiveAveragePooling1D(2)(x),
    "AdaptiveMaxPooling1D": lambda x: L.AdaptiveMaxPooling1D(2)(x),
    "AdditiveAttention": lambda x: L.AdditiveAttention(dropout=0.2)([x, x]),
    "Attention": lambda x: L.Attention(dropout=0.2, use_scale=True)([x, x], use_causal_mask=True),
    "AveragePooling1D": lambda x: L.AveragePooling1D(2)(x),
    "Conv1D": lambda x: L.Conv1D(3, 3)(x),
    "Conv1DTranspose": lambda x: L.Conv1DTranspose(3, 3)(x),
    "Cropping1D": lambda x: L.Cropping1D(1)(x),
    "DepthwiseConv1D": lambda x: L.DepthwiseConv1D(3)(x),
    "EinsumDense": lambda x: L.EinsumDense("abc,cd->abd", (6, 3), bias_axes="d")(x),
    "GlobalAveragePooling1D": lambda x: L.GlobalAveragePooling1D()(x),
    "GlobalMaxPooling1D": lambda x: L.GlobalMaxPooling1D()(x),
    "GroupNormalization": lambda x: L.GroupNormalization(2)(x),
    "GroupQueryAttention": lambda x: L.GroupQueryAttention(2, 4, 2, dropout=0.2)(x, x),
    "Masking": lambda x: L.SimpleRNN(3)(L.Masking()(x)),
    "MaxPooling1D": lambda x: L.MaxPooling1D(2)(x),
    "MultiHeadAttention": lambda x: L.MultiHeadAttention(2, 4, dropout=0.2)(
        x, x, use_causal_mask=True
    ),
    "Permute": lambda x: L.Permute((2, 1))(x),
    "SeparableConv1D": lambda x: L.SeparableConv1D(3, 3)(x),
    "SpatialDropout1D": lambda x: L.SpatialDropout1D(0.3)(x),
    "UpSampling1D": lambda x: L.UpSampling1D()(x),
    "ZeroPadding1D": lambda x: L.ZeroPadding1D(1)(x),
}

RECURRENT: dict[str, Recipe] = {
    "Bidirectional": lambda x: L.Bidirectional(L.GRU(2, dropout=0.2, return_sequences=True))(x),
    "GRU": lambda x: L.GRU(3, dropout=0.2, recurrent_dropout=0.2)(x),
    "GRUCell": lambda x: L.RNN(L.GRUCell(3))(x),
    "LSTM": lambda x: ops.concatenate(L.LSTM(3, return_state=True)(x), -1),
    "LSTMCell": lambda x: L.RNN(L.LSTMCell(3, dropout=0.2), return_sequences=True)(x),
    "RNN": lambda x: L.RNN(L.SimpleRNNCell(3), unroll=True)(x),
    "SimpleRNN": lambda x: L.SimpleRNN(3, recurrent_dropout=0.2, go_backwards=True)(x),
    "SimpleRNNCell": lambda x: L.RNN(L.SimpleRNNCell(3, dropout=0.2))(x),
    "StackedRNNCells": lambda x: L.RNN(L.StackedRNNCells([L.GRUCell(3), L.LSTMCell(2)]))(x),
    "TimeDistributed": lambda x: L.TimeDistributed(L.Dense(3, "tanh"))(x),
}

IMAGES: dict[str, Recipe] = {
    "AdaptiveAveragePooling2D": lambda x: L.AdaptiveAveragePooling2D(2)(x),
    "AdaptiveMaxPooling2D": lambda x: L.AdaptiveMaxPooling2D(2)(x),
    "AveragePooling2D": lambda x: L.AveragePooling2D(2)(x),
    "CenterCrop": lambda x: L.CenterCrop(6, 6)(x),
    "Conv2D": lambda x: L.Conv2D(2, 3, strides=2)(x),
    "Conv2DTranspose": lambda x: L.Conv2DTranspose(2, 3)(x),
    "ConvLSTM1D": lambda x: L.ConvLSTM1D(2, 3)(x),
    "Cropping2D": lambda x: L.Cropping2D(1)(x),
    "DepthwiseConv2D": lambda x: L.DepthwiseConv2D(3)(x),
    "GlobalAveragePooling2D": lambda x: L.GlobalAveragePooling2D()(x),
    "GlobalMaxPooling2D": lambda x: L.GlobalMaxPooling2D()(x),
    "MaxPooling2D": lambda x: L.MaxPooling2D(2)(x),
    "Resizing": lambda x: L.Resizing(5, 5)(x),
    "SeparableConv2D": lambda x: L.SeparableConv2D(2, 3)(x),
    "SpatialDropout2D": lambda x: L.SpatialDropout2D(0.3)(x),
    "UpSampling2D": lambda x: L.UpSampling2D()(x),
    "ZeroPadding2D": lambda x: L.ZeroPadding2D(1)(x),
}

VOLUMES: dict[str, Recipe] = {
    "AdaptiveAveragePooling3D": lambda x: L.AdaptiveAveragePooling3D(2)(x),
    "AdaptiveMaxPooling3D": lambda x: L.AdaptiveMaxPooling3D(2)(x),
    "AveragePooling3D": lambda x: L.AveragePooling3D(2)(x),
    "Conv3D": lambda x: L.Conv3D(2, 2)(x),
    "Conv3DTranspose": lambda x: L.Conv3DTranspose(2, 2)(x),
    "ConvLSTM2D": lambda x: L.ConvLSTM2D(2, 3, recurrent_dropout=0.2)(x),
    "ConvLSTM3D": lambda x: L.ConvLSTM3D(2, 2)(ops.expand_dims(x, 1)),
    "Cropping3D": lambda x: L.Cropping3D(1)(x),
    "GlobalAveragePooling3D": lambda x: L.GlobalAveragePooling3D()(x),
    "GlobalMaxPooling3D": lambda x: L.GlobalMaxPooling3D()(x),
    "MaxPooling3D": lambda x: L.MaxPooling3D(2)(x),
    "SpatialDropout3D": lambda x: L.SpatialDropout3D(0.3)(x),
    "UpSampling3D": lambda x: L.UpSampling3D()(x),
    "ZeroPadding3D": lambda x: L.ZeroPadding3D(1)(x),
}

TOKENS: dict[str, Recipe] = {
    "CategoryEncoding": lambda x: L.CategoryEncoding(9, output_mode="multi_hot")(x),
    "Discretization": lambda x: L.Discretization([2.0, 5.0])(x),
    "Embedding": lambda x: L.LSTM(3)(L.Embedding(9, 4, mask_zero=True)(x)),
    "HashedCrossing": lambda x: L.HashedCrossing(7)((x[:, 0], x[:, 1])),
    "Hashing": lambda x: L.Hashing(5)(x),
    "IntegerLookup": lambda x: L.IntegerLookup(vocabulary=[1, 2, 3])(x),
    "ReversibleEmbedding": lambda x: _reversible(L.ReversibleEmbedding(9, 4), x),
}

TEXT: dict[str, Recipe] = {
    "StringLookup": lambda x: L.StringLookup(vocabulary=["a", "b", "c"])(x),
    "TextVectorization": lambda x: L.Embedding(7, 3)(
        L.TextVectorization(vocabulary=["a", "b"], output_sequence_length=3)(x)
    ),
}

# Augmentations of the input images themselves. Those that do not take raw images in [0, 1].
_UNIT = {"value_range": (0.0, 1.0)}
AUGMENTATIONS: dict[str, Recipe] = {
    "AugMix": lambda x: L.AugMix(**_UNIT)(x),
    "AutoContrast": lambda x: L.AutoContrast(**_UNIT)(x),
    "ContrastLimitedAdaptiveHistogramEqualization": lambda x: (
        L.ContrastLimitedAdaptiveHistogramEqualization(tile_grid_size=(2, 2), **_UNIT)(x)
    ),
    "CutMix": lambda x: L.CutMix()(x),
    "Equalization": lambda x: L.Equalization(**_UNIT)(x),
    "MaxNumBoundingBoxes": lambda x: L.MaxNumBoundingBoxes(3)(x),
    "MixUp": lambda x: L.MixUp()(x),
    "Pipeline": lambda x: L.Pipeline([L.RandomFlip(), L.Rescaling(2.0)])(x),
    "RandAugment": lambda x: L.RandAugment(**_UNIT)(x),
    "RandomBrightness": lambda x: L.RandomBrightness(0.5, **_UNIT)(x),
    "RandomColorDegeneration": lambda x: L.RandomColorDegeneration(0.5, **_UNIT)(x),
    "RandomColorJitter": lambda x: L.RandomColorJitter(brightness_factor=0.5, **_UNIT)(x),
    "RandomContrast": lambda x: L.RandomContrast(0.5, **_UNIT)(x),
    "RandomCrop": lambda x: L.RandomCrop(5, 5)(x),
    "RandomElasticTransform": lambda x: L.RandomElasticTransform(**_UNIT)(x),
    "RandomErasing": lambda x: L.RandomErasing(**_UNIT)(x),
    "RandomFlip": lambda x: L.RandomFlip()(x),
    "RandomGaussianBlur": lambda x: L.RandomGaussianBlur(1.0, 3, 0.5, **_UNIT)(x),
    "RandomGrayscale": lambda x: L.RandomGrayscale(0.5)(x),
    "RandomHue": lambda x: L.RandomHue(0.5, **_UNIT)(x),
    "RandomInvert": lambda x: L.RandomInvert(0.5, **_UNIT)(x),
    "RandomPerspective": lambda x: L.RandomPerspective()(x),
    "RandomPosterization": lambda x: L.RandomPosterization(4, **_UNIT)(x),
    "RandomRotation": lambda x: L.RandomRotation(0.3)(x),
    "RandomSaturation": lambda x: L.RandomSaturation(0.5, **_UNIT)(x),
    "RandomSharpness": lambda x: L.RandomSharpness(0.5, **_UNIT)(x),
    "RandomShear": lambda x: L.RandomShear(0.3, 0.3)(x),
    "RandomTranslation": lambda x: L.RandomTranslation(0.3, 0.3)(x),
    "RandomZoom": lambda x: L.RandomZoom(0.3)(x),
    "Solarization": lambda x: L.Solarization(0.2, **_UNIT)(x),
}

SIGNALS: dict[str, Recipe] = {
    "MelSpectrogram": lambda x: L.MelSpectrogram(16, 8, sampling_rate=64, num_mel_bins=4)(x),
    "STFTSpectrogram": lambda x: L.STFTSpectrogram(frame_length=8, frame_step=4, fft_length=8)(
        ops.expand_dims(x, -1)
    ),
}

# Layers that have no recipe, each with the reason.
EXCLUDED = {
    "FlaxLayer": "needs the JAX backend or jax2tf",
    "InputLayer": "no operation: the beginning of every model here",
    "JaxLayer": "needs the JAX backend or jax2tf",
    "Layer": "abstract; its subclasses are in test_custom_layers.py",
    "TorchModuleWrapper": "needs the PyTorch backend",
    "Wrapper": "abstract; its subclasses are here, and one in test_custom_layers.py",
}

WORDS = tf.constant([["a b"], ["b"], ["c c a"], ["d"], ["a"], ["b b"], ["c a"], ["a b c"]])


def _reversible(embedding: L.Layer, tokens: Any) -> Any:
    return embedding(L.Dense(4, "tanh")(embedding(tokens)), reverse=True)

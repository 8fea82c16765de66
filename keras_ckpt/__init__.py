"""Train Keras models that do not fit in memory."""

from keras_ckpt.recompute import recompute

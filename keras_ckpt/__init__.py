"""Train Keras models that do not fit in memory.

Swap `keras.Model` for `CheckpointedModel`: the activations between checkpoints are dropped in the
forward pass and recomputed in the backward pass, and the training run stays the same.
"""

from importlib.metadata import version

from keras_ckpt.conversion import checkpointed
from keras_ckpt.enabling import disable, enable, enabled
from keras_ckpt.marker import CheckpointMarker
from keras_ckpt.memory import compare, profile
from keras_ckpt.model import CheckpointedModel, CheckpointedSequential
from keras_ckpt.plan import Plan
from keras_ckpt.planning import make_plan
from keras_ckpt.recompute import recompute

__all__ = [
    "CheckpointMarker",
    "CheckpointedModel",
    "CheckpointedSequential",
    "Plan",
    "checkpointed",
    "compare",
    "disable",
    "enable",
    "enabled",
    "make_plan",
    "profile",
    "recompute",
]

__version__ = version("keras-ckpt")

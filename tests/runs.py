"""The three modes in which Keras runs a train step."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

MODES = ("graph", "jit", "eager")


def run_in(mode: str, step: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled as Keras compiles a train step in this mode."""
    if mode == "eager":
        return step
    return tf.function(step, jit_compile=mode == "jit", autograph=False)


def compile_options(mode: str) -> dict[str, bool]:
    """The arguments of `Model.compile` that choose the mode."""
    return {"run_eagerly": mode == "eager", "jit_compile": mode == "jit"}

"""Python's own random numbers, which Keras does not know of.

Layers may decide by `random` or `numpy.random`: `keras.layers.AugMix` chooses its operations so,
and so does many an implementation of stochastic depth.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


def capture() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Notes the state of Python's and NumPy's global generators.

    Returns:
        a function that makes a context manager: inside it the same numbers are drawn as after
        this call, and afterwards the generators go on as if it had not been.
    """
    before = _state()

    @contextlib.contextmanager
    def replayed() -> Iterator[None]:
        now = _state()
        _set_state(before)
        try:
            yield
        finally:
            _set_state(now)

    return replayed


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Lets nothing be drawn, or raises.

    Raises:
        ValueError: on exit, if a number has been drawn.
    """
    with capture()():
        before = repr(_state())
        yield
        if repr(_state()) != before:
            raise ValueError("it draws random numbers of Python's or NumPy's")


def _state() -> Any:
    # The global generator is what layers draw from, old as it is.
    return random.getstate(), np.random.get_state()  # noqa: NPY002


def _set_state(state: Any) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])  # noqa: NPY002

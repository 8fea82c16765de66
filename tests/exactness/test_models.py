"""Models of every shape train as in plain Keras, under every setting and in every execution.

The full matrix of twelve is run by `FULL`, the model with all kinds of state. The others run four
of the twelve: each setting once, each execution at least once.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.exactness.compare import EXECUTIONS, SETTINGS, check
from tests.exactness.model_cases import CASES

FULL = ("dropout_and_batch_norm_C02_C03",)
DIAGONAL = (("graph", "nested"), ("jit", 3), ("eager", "sqrt"), ("eager", "memory"))


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_whole_matrix(name: str, execution: str, setting: Any) -> None:
    check(CASES[name], execution, setting)


@pytest.mark.parametrize("name", [name for name in CASES if name not in FULL])
@pytest.mark.parametrize(("execution", "setting"), DIAGONAL)
def test_every_setting_once(name: str, execution: str, setting: Any) -> None:
    check(CASES[name], execution, setting)

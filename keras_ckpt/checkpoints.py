"""The `checkpoints=` argument: what a user may ask for, checked as early as it can be.

A setting is checked in two steps: its form when it is given, and what it names when the model's
steps are known.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

import keras

from keras_ckpt.graph import LinearModel
from keras_ckpt.marker import CheckpointMarker
from keras_ckpt.plan import Plan

MODES = ("memory", "speed", "collection", "sqrt", "budget")

Setting = None | bool | int | str | tuple[str, ...] | Plan


def check_setting(
    checkpoints: Any, memory_limit: Any = None, model: LinearModel | None = None
) -> Setting:
    """Checks the form of a `checkpoints=` value and makes it one that can be saved.

    Args:
        checkpoints: as given by the user.
        memory_limit: the limit given with it.
        model: the linearised model, if there is one yet, to find KerasTensors in.

    Returns:
        None, False, an int, a mode, a `Plan`, or the names of layers as a tuple.

    Raises:
        ValueError: if it is an unknown mode, an int below 1, an empty list, or a mode that does
            not go with a memory limit.
        TypeError: if it is of no type that says anything.
    """
    if checkpoints is True:
        raise ValueError(
            "`checkpoints=True` does not say what to keep. Leave it out to have the checkpoints "
            f"chosen, or give one of {_quoted(MODES)}, an int, a list of layers, or a Plan."
        )
    if isinstance(checkpoints, str):
        if checkpoints not in MODES:
            raise ValueError(
                f"Unknown mode `checkpoints={checkpoints!r}`.{_suggestion(checkpoints, MODES)} "
                f"The modes are {_quoted(MODES)}; to keep the output of one layer, give a list: "
                f"`checkpoints=[{checkpoints!r}]`."
            )
    elif isinstance(checkpoints, int) and checkpoints is not False:
        if checkpoints < 1:
            raise ValueError(
                f"`checkpoints={checkpoints}` asks for {checkpoints} segments. Give at least 1, "
                "or False to recompute nothing."
            )
    elif isinstance(checkpoints, list | tuple):
        checkpoints = _names(checkpoints, model)
    elif not (checkpoints is None or checkpoints is False or isinstance(checkpoints, Plan)):
        raise TypeError(
            f"`checkpoints` cannot be {checkpoints!r} (a {type(checkpoints).__name__}). Give one "
            f"of {_quoted(MODES)}, an int, a list of layers, a Plan, None or False."
        )
    if checkpoints == "budget" and memory_limit is None:
        raise ValueError("`checkpoints='budget'` needs a `memory_limit`, such as '2GB'.")
    if memory_limit is not None and checkpoints not in (None, "budget"):
        raise ValueError(
            f"`memory_limit` chooses the checkpoints by itself and cannot be combined with "
            f"`checkpoints={checkpoints!r}`. Leave one of them out."
        )
    return checkpoints


def find_cuts(setting: Sequence[str], model: LinearModel) -> list[int]:
    """The boundaries just after the layers that are named.

    Args:
        setting: names of layers or steps. A name of a nested layer may leave out the models
            around it if it is the only one of this name; that of a nested model means its end.
        model: the linearised model.

    Returns:
        step indices; a layer that is called several times gives several.

    Raises:
        ValueError: if a name is unknown or ambiguous, listing the nearest names.
    """
    return sorted({cut for name in setting for cut in _cuts_after(name, model)})


def marker_cuts(model: LinearModel) -> list[int]:
    """The boundaries just after the model's `CheckpointMarker` layers."""
    return [i + 1 for i, step in enumerate(model.steps) if isinstance(step.layer, CheckpointMarker)]


def describe(setting: Setting) -> str:
    """The setting in words, for a plan's summary."""
    if isinstance(setting, tuple):
        return f"at {len(setting)} named layer" + ("s" if len(setting) != 1 else "")
    if isinstance(setting, int) and setting is not False:
        return f"{setting} equal segments"
    return setting.checkpoints if isinstance(setting, Plan) else str(setting)


def _names(values: Sequence[Any], model: LinearModel | None) -> tuple[str, ...]:
    if not values:
        raise ValueError("`checkpoints=[]` names no layer. Give False to recompute nothing.")
    return tuple(_name_of(value, model) for value in values)


def _name_of(value: Any, model: LinearModel | None) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, keras.layers.Layer):
        return value.name
    if not isinstance(value, keras.KerasTensor):
        raise TypeError(
            f"`checkpoints` lists {value!r} (a {type(value).__name__}). Name layers, or give the "
            "layers or their outputs (KerasTensors) themselves."
        )
    if model is not None:
        for step in model.steps:
            if any(model.tensors[t] is value for t in step.outputs):
                return step.name if "#" in step.name else f"{step.name}#1"
    raise ValueError(
        f"`checkpoints` lists {value}, which is not the output of a step of this model. Give the "
        "name of the layer whose output it is."
    )


def _cuts_after(name: str, model: LinearModel) -> list[int]:
    names = [step.name for step in model.steps]
    call = name.removesuffix("#1")
    if "#" in name and call in names:
        return [names.index(call) + 1]
    bare = [_bare(step_name) for step_name in names]
    for candidates in (_exactly(name, bare), _inside(name, names), _by_last_part(name, bare)):
        if candidates:
            return candidates
    last_parts = {part.rsplit("/", 1)[-1] for part in bare}
    raise ValueError(
        f"`checkpoints` names '{name}', but model '{model.name}' has no layer of this name on the "
        f"way to its outputs.{_suggestion(name, [*bare, *last_parts])} Its steps are: "
        f"{_quoted(list(dict.fromkeys(bare))[:40])}{', ...' if len(bare) > 40 else ''}."
    )


def _bare(name: str) -> str:
    """A step's name without the numbers of calls."""
    return re.sub(r"#\d+(?=/|$)", "", name)


def _exactly(name: str, bare: list[str]) -> list[int]:
    return [i + 1 for i, x in enumerate(bare) if x == name]


def _inside(name: str, names: list[str]) -> list[int]:
    """The ends of each call of a nested model."""
    calls = []
    for x in names:
        parts = x.split("/")
        around = ["/".join(parts[:i]) for i in range(1, len(parts))]
        calls.append(next((call for call in around if name in (call, _bare(call))), None))
    return [i + 1 for i, call in enumerate(calls) if call and calls[i + 1 : i + 2] != [call]]


def _by_last_part(name: str, bare: list[str]) -> list[int]:
    matches = {x for x in bare if x.endswith(f"/{name}")}
    if len(matches) > 1:
        raise ValueError(
            f"`checkpoints` names '{name}', of which the model has several. Say which: "
            f"{_quoted(sorted(matches))}."
        )
    return [i + 1 for i, x in enumerate(bare) if x in matches]


def _suggestion(name: str, names: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean '{nearest[0]}'?" if nearest else ""


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)

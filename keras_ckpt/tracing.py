"""The costs of a model's steps, from traces of each distinct step: nothing runs.

Steps that are alike (the same operation, configuration, shapes and weights) are traced once, and
traces are kept as long as the linearised model is, so that planning again is quick.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from keras_ckpt import keras_internals
from keras_ckpt.costs import ModelCosts, StepCost
from keras_ckpt.graph import LinearModel, Ref, Step
from keras_ckpt.passes import TensorInfo
from keras_ckpt.step_trace import StepTrace, guess_step, trace_step
from keras_ckpt.updates import update_cost

Key = Hashable

# What an operation's attributes hold besides its settings: its name and its place in graphs.
_NOT_SETTINGS = {"name", "_inbound_nodes", "_outbound_nodes", "_auto_config"}

_traces: weakref.WeakKeyDictionary[LinearModel, dict[Key, StepTrace]] = weakref.WeakKeyDictionary()


def trace_costs(
    linear: LinearModel, inputs: Sequence[keras.KerasTensor], model: keras.Model
) -> ModelCosts:
    """Works out what each step of a model saves, allocates and computes in a train step.

    Steps that cannot be traced are taken to save all that they read and make, and a warning
    names them.

    Args:
        linear: the linearised model.
        inputs: the model's flat inputs, with every dimension known.
        model: the model, for its weights and its optimizer.

    Returns:
        The costs, in bytes and FLOPs.

    Example:

    >>> from keras_ckpt.graph import linearise
    >>> x = keras.Input((4,), batch_size=2)
    >>> model = keras.Model(x, keras.layers.Dense(8)(x))
    >>> trace_costs(linearise(model), [x], model).steps[0].forward_flops  # 2 x 2 x 4 x 8 and bias
    144.0
    """
    assembly = _Assembly(linear, inputs)
    update = update_cost(getattr(model, "optimizer", None))
    for step, traced in zip(linear.steps, traced_steps(linear, inputs), strict=True):
        assembly.add(step, traced.trace, update.workspace(step))
    return assembly.costs(inputs, resting_bytes(inputs, model), update.bytes_ahead(model))


@dataclass(frozen=True)
class TracedStep:
    """A step's trace, and what it was found by.

    Attributes:
        key: equal for steps that are alike.
        inputs: what is known of each of the step's inputs.
        used: whether each of its outputs is read by anything.
        trace: what the step costs.
    """

    key: Key
    inputs: tuple[TensorInfo | None, ...]
    used: tuple[bool, ...]
    trace: StepTrace


def traced_steps(linear: LinearModel, inputs: Sequence[keras.KerasTensor]) -> list[TracedStep]:
    """Traces the steps of a model, each kind of step once."""
    known = _traces.setdefault(linear, {})
    infos: dict[int, TensorInfo | None] = {
        t: _info_of(spec) for t, spec in zip(linear.inputs, inputs, strict=True)
    }
    traced = []
    for index, step in enumerate(linear.steps):
        seen = tuple(infos[t] for t in step.inputs)
        used = tuple(linear.last_use(t) > index for t in step.outputs)
        key = (_configuration(step), seen, used)
        if key not in known:
            known[key] = _trace_or_guess(linear, step, seen, used)
        trace = known[key]
        infos.update(zip(step.outputs, (x.info for x in trace.outputs), strict=True))
        traced.append(TracedStep(key, seen, used, trace))
    _warn_of_guesses(linear, traced)
    return traced


class _Assembly:
    """Steps' costs put together: storages are numbered over the whole model."""

    def __init__(self, linear: LinearModel, inputs: Sequence[keras.KerasTensor]) -> None:
        self._linear = linear
        self._storages: dict[int, int] = {}
        self._bytes: list[int] = []
        self._differentiable: list[bool] = []
        self._steps: list[StepCost] = []
        for tensor, spec in zip(linear.inputs, inputs, strict=True):
            self._storages[tensor] = self._new_storage(_info_of(spec).bytes)

    def add(self, step: Step, trace: StepTrace, update_workspace: int) -> None:
        """Adds the next step; its weights are updated while the backward pass goes on."""
        before = len(self._bytes)
        inputs = [self._storages[t] for t in step.inputs]
        outputs: list[int] = []
        for tensor, output in zip(step.outputs, trace.outputs, strict=True):
            if output.input is not None:
                storage = inputs[output.input]
            elif output.output is not None:
                storage = outputs[output.output]
            else:
                storage = self._new_storage(output.bytes)
            outputs.append(storage)
            self._storages[tensor] = storage
            self._differentiable[storage] |= output.info is not None and output.info.differentiable
        saved = [inputs[i] for i in trace.saved_inputs] + [outputs[i] for i in trace.saved_outputs]
        self._steps.append(
            StepCost(
                name=step.name,
                inputs=tuple(dict.fromkeys(inputs)),
                outputs=tuple(range(before, len(self._bytes))),
                saved=tuple(dict.fromkeys(saved)),
                residual_bytes=trace.residual_bytes,
                forward_flops=trace.forward_flops,
                backward_flops=trace.backward_flops,
                free_flops=trace.free_flops,
                forward_workspace=trace.forward_workspace,
                backward_workspace=trace.backward_workspace + update_workspace,
                weight_gradient_bytes=trace.weight_gradient_bytes,
                expensive=trace.expensive,
            )
        )

    def costs(self, inputs: Sequence[keras.KerasTensor], resting: int, standing: int) -> ModelCosts:
        """The costs of all steps added."""
        return ModelCosts(
            steps=tuple(self._steps),
            storage_bytes=tuple(self._bytes),
            differentiable=tuple(self._differentiable),
            inputs=tuple(self._storages[t] for t in self._linear.inputs),
            outputs=tuple(dict.fromkeys(self._storages[t] for t in self._linear.outputs)),
            resting_bytes=resting,
            batch_size=inputs[0].shape[0] if inputs and inputs[0].shape else None,
            standing_bytes=standing,
        )

    def _new_storage(self, size: int) -> int:
        self._bytes.append(size)
        self._differentiable.append(False)
        return len(self._bytes) - 1


def resting_bytes(inputs: Sequence[keras.KerasTensor], model: keras.Model) -> int:
    """Weights, optimizer variables and input data: what is there before a train step begins."""
    data = sum(_info_of(spec).bytes for spec in inputs)
    return data + _variable_bytes([*model.weights, *_optimizer_variables(model)])


def _optimizer_variables(model: keras.Model) -> list[keras.Variable]:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or optimizer.built:
        return optimizer.variables if optimizer else []

    def build_twin(scope: contextlib.AbstractContextManager[Any]) -> list[keras.Variable]:
        twin = type(optimizer).from_config(optimizer.get_config())
        with scope:
            twin.build(model.trainable_variables)
        return list(twin.variables)

    # Variables made in a stateless scope have a shape, but take no memory yet.
    stateless = keras.StatelessScope(initialize_variables=False)
    try:
        return keras_internals.run_isolated(lambda: build_twin(stateless))
    except (ValueError, AttributeError):
        # Some optimizers fill their variables at once, which the scope refuses: so they are made.
        return keras_internals.run_isolated(lambda: build_twin(contextlib.nullcontext()))


def _variable_bytes(variables: Sequence[keras.Variable]) -> int:
    distinct = {id(variable): variable for variable in variables}
    return sum(_info_of(variable).bytes for variable in distinct.values())


def _info_of(tensor: keras.KerasTensor | keras.Variable) -> TensorInfo:
    return TensorInfo(tuple(tensor.shape), tensor.dtype)


def _trace_or_guess(
    linear: LinearModel, step: Step, infos: Sequence[TensorInfo | None], used: Sequence[bool]
) -> StepTrace:
    try:
        return keras_internals.run_isolated(lambda: trace_step(step, infos, used))
    except Exception as error:  # Whatever a layer's own code may raise.
        outputs = [linear.tensors[t] for t in step.outputs]
        return guess_step(step, infos, outputs, f"{type(error).__name__}: {error}")


def _warn_of_guesses(linear: LinearModel, traced: Sequence[TracedStep]) -> None:
    guesses = {
        step.name: found.trace.problem
        for step, found in zip(linear.steps, traced, strict=True)
        if found.trace.problem
    }
    if guesses:
        names = ", ".join(f"'{name}'" for name in guesses)
        warnings.warn(
            f"What the steps {names} of model '{linear.name}' save could not be traced; they are "
            f"taken to save all that they read and make. The first one raised "
            f"{next(iter(guesses.values()))}",
            stacklevel=3,
        )


def _configuration(step: Step) -> Key:
    """What a step's costs depend on, besides its inputs: equal for steps that are alike."""
    places = {t: i for i, t in enumerate(step.inputs)}
    arguments = keras.tree.map_structure(
        lambda x: f"input {places[x.tensor]}" if isinstance(x, Ref) else x, (step.args, step.kwargs)
    )
    variables = step.layer.variables if step.layer else []
    weights = tuple((tuple(v.shape), v.dtype, v.trainable) for v in variables)
    return (type(step.operation), _settings(step.operation), repr(arguments), weights)


def _settings(operation: Any) -> Key:
    """An operation's configuration without its name; the operation itself if it has none."""
    if isinstance(operation, keras.layers.Lambda):
        return operation
    if isinstance(operation, keras.layers.Layer):
        try:
            return repr(_without_names(operation.get_config()))
        except Exception:  # Layers need no configuration; user code may fail in any way.
            return operation
    if isinstance(operation, keras.Operation):
        return repr(sorted(_settable(vars(operation)).items()))
    return operation


def _without_names(config: Any) -> Any:
    if isinstance(config, list | tuple):
        return [_without_names(x) for x in config]
    if not isinstance(config, dict):
        return config
    # A layer's configuration; the name of a dtype policy, for one, does matter.
    names = {"name", "build_config"} if "trainable" in config else {"build_config"}
    return {k: _without_names(v) for k, v in config.items() if k not in names}


def _settable(attributes: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in attributes.items() if k not in _NOT_SETTINGS}

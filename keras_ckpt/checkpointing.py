"""What a checkpointed model knows beyond its layers: its setting, its plan, its steps.

A model holds one such object. It decides for each call whether the plan applies, makes the plan
when the first training call shows the shapes, and runs the steps under it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import keras

from keras_ckpt import keras_internals
from keras_ckpt.checkpoints import Setting, check_setting
from keras_ckpt.execute import Execution
from keras_ckpt.graph import LinearModel, linearise
from keras_ckpt.plan import Plan, unnumbered
from keras_ckpt.planning import DEFAULT_BATCH_SIZE, check_against, input_specs, plan_steps
from keras_ckpt.sizes import parse_bytes
from keras_ckpt.subclassed import TracedCalls


class Checkpointing:
    """The setting of one model, and what follows from it.

    Args:
        model: the model.
        checkpoints: the setting as given by the user, or as `get_config` described it.
        memory_limit: the memory limit, likewise.

    Raises:
        ValueError: if a setting is of no known form, or does not fit the model.
        TypeError: if a setting is of a wrong type.
    """

    SETTINGS: ClassVar = ("checkpoints", "memory_limit")

    def __init__(
        self, model: keras.Model, checkpoints: Any, memory_limit: int | str | None
    ) -> None:
        if isinstance(checkpoints, dict):
            checkpoints = Plan.from_dict(checkpoints)
        if memory_limit is not None:
            parse_bytes(memory_limit)
        graph = keras_internals.inner_functional(model)
        linear = None if graph is None else linearise(model)
        self.setting: Setting = check_setting(checkpoints, memory_limit, linear)
        if linear is not None:
            check_against(self.setting, linear)
        self.memory_limit = memory_limit
        self.plan: Plan | None = None
        self._model = model
        self._linear = (graph, linear)
        self._traced = TracedCalls(model)
        self._plans: dict[Any, Plan] = {}
        self._batch_size = DEFAULT_BATCH_SIZE
        self._in_train_step = False

    def get_config(self) -> dict[str, Any]:
        """The settings as values that JSON can hold."""
        setting = self.setting
        if isinstance(setting, Plan):
            setting = setting.to_dict()  # type: ignore[assignment]
        return {"checkpoints": setting, "memory_limit": self.memory_limit}

    def note_batch_size(self, x: Any, batch_size: int | None) -> None:
        """Remembers the batch size that `fit` was asked for, for shapes that leave it open.

        Where the plan was made for a smaller one, another is made, and the step traced again.
        """
        if batch_size is not None or not hasattr(x, "element_spec"):
            self._batch_size = batch_size or DEFAULT_BATCH_SIZE
            if self.plan is not None and self._is_outgrown(self.plan, self._batch_size):
                self._model.train_function = None

    @contextlib.contextmanager
    def train_step(self) -> Iterator[None]:
        """Inside, a call is a training call even if the model's `call` takes no `training`.

        Gradient functions of Keras's own are released as well: each would keep the whole trace,
        and with it the model.
        """
        self._in_train_step = True
        try:
            with keras_internals.releasing_gradients():
                yield
        finally:
            self._in_train_step = False

    def call(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call of the model, under the plan if it is one in training.

        Args:
            plain: the model's own `call`, bound.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        training = kwargs.get("training", keras_internals.training_of_call())
        is_training = training or (training is None and self._in_train_step)
        if self.setting is False or not is_training or keras_internals.is_symbolic((args, kwargs)):
            return plain(*args, **kwargs)
        return self._run_under_plan(plain, args, kwargs)

    @keras_internals.without_autograph
    def _run_under_plan(
        self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        graph = keras_internals.inner_functional(self._model)
        if graph is None:
            call = self._traced.find(plain, args, kwargs)
            if call is None:
                return plain(*args, **kwargs)
            linear, inputs, pack = call.linear, call.inputs(args, kwargs), call.pack
            context = {"training": keras_internals.training_of_call()}
        else:
            linear = self._linear_of(graph)
            inputs, context = keras_internals.functional_inputs(graph, *args, **kwargs)
            pack = functools.partial(keras_internals.pack_outputs, graph)
        segments = self._plan_for(linear, inputs).segments
        return pack(Execution(linear, segments, context).run(inputs))

    def _linear_of(self, graph: keras_internals.Functional) -> LinearModel:
        known, linear = self._linear
        # A Sequential model gets another graph when a layer is added.
        if known is not graph or linear is None:
            linear = linearise(self._model)
            self._linear = (graph, linear)
        return linear

    def _plan_for(self, linear: LinearModel, inputs: list[Any]) -> Plan:
        """The plan for steps and shapes; made again when other weights are trained."""
        shapes = [tuple(x.shape) for x in inputs]
        specs = input_specs(linear, self._batch_size, shapes)
        trained = tuple(weight.trainable for weight in self._model.weights)
        names = tuple(unnumbered(step.name) for step in linear.steps)
        key = (names, trained, tuple(shape[1:] for shape in shapes))
        known = self._plans.get(key)
        batch_size = specs[0].shape[0] if specs and specs[0].shape else None
        if known is None or self._is_outgrown(known, batch_size):
            known = plan_steps(linear, self.setting, specs, self.memory_limit, self._model)
            self._plans[key] = known
        self.plan = known
        return known

    def _is_outgrown(self, plan: Plan, batch_size: int | None) -> bool:
        """Whether a plan that was chosen by its costs was chosen for a smaller batch."""
        by_costs = self.setting in (None, "memory", "speed", "budget")
        return by_costs and (batch_size or 0) > (plan.batch_size or 0)

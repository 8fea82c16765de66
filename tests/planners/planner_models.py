"""Models to plan for: costs made by hand, at random, and in the shape of known networks."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from keras_ckpt.costs import ModelCosts, StepCost


def chain(
    count: int,
    size: int = 8,
    *,
    saves: str = "output",
    flops: float = 1.0,
    free: float = 0.0,
    weight_gradient: int = 0,
) -> ModelCosts:
    """A uniform chain; `saves` is "output", "input" or "nothing"."""
    steps = tuple(
        StepCost(
            name=f"step{i}",
            inputs=(i,),
            outputs=(i + 1,),
            saved={"output": (i + 1,), "input": (i,), "nothing": ()}[saves],
            forward_flops=flops,
            backward_flops=2 * flops,
            free_flops=free,
            weight_gradient_bytes=weight_gradient,
        )
        for i in range(count)
    )
    return ModelCosts(
        steps=steps,
        storage_bytes=(size,) * (count + 1),
        differentiable=(False, *(True,) * count),
        inputs=(0,),
        outputs=(count,),
    )


def random_costs(seed: int, count: int, *, skips: bool, large: int = 12) -> ModelCosts:
    """Random steps; without `skips`, each reads only the output of the one before."""
    draw = random.Random(seed)
    steps, sizes, differentiable = [], [draw.randint(1, large)], [draw.random() < 0.3]
    made: list[int] = []
    for index in range(count):
        inputs = [made[-1] if made else 0]
        if skips:
            inputs += [s for s in [0, *made[:-1]] if draw.random() < 0.25]
            if made and draw.random() < 0.1:
                inputs = inputs[1:] or inputs
        outputs = []
        for _ in range(draw.choice([1, 1, 1, 2, 0]) if skips and made else 1):
            outputs.append(len(sizes))
            sizes.append(draw.randint(1, large))
            differentiable.append(draw.random() < 0.9)
        saved = [s for s in (*inputs, *outputs) if draw.random() < 0.5]
        forward = float(draw.randint(0, 9))
        steps.append(
            StepCost(
                name=f"step{index}",
                inputs=tuple(dict.fromkeys(inputs)),
                outputs=tuple(outputs),
                saved=tuple(dict.fromkeys(saved)),
                residual_bytes=draw.choice([0, 0, draw.randint(1, large)]),
                forward_flops=forward,
                backward_flops=float(draw.randint(0, 20)),
                free_flops=draw.choice([0.0, forward, float(draw.randint(0, int(forward)))]),
                forward_workspace=draw.choice([0, draw.randint(1, large)]),
                backward_workspace=draw.choice([0, draw.randint(1, large)]),
                weight_gradient_bytes=draw.choice([0, draw.randint(1, 3 * large)]),
                expensive=draw.random() < 0.5,
            )
        )
        made += outputs
    outputs = {made[-1], *(s for s in made if skips and draw.random() < 0.1)}
    return ModelCosts(
        tuple(steps),
        tuple(sizes),
        tuple(differentiable),
        (0,),
        tuple(sorted(outputs)),
        standing_bytes=draw.choice([0, draw.randint(1, large)]),
    )


def costs(max_steps: int, *, skips: bool, min_steps: int = 1) -> st.SearchStrategy[ModelCosts]:
    """A hypothesis strategy over `random_costs`."""
    return st.builds(
        random_costs,
        st.integers(0, 2**32 - 1),
        st.integers(min_steps, max_steps),
        skips=st.just(skips),
    )


def unet(depth: int, size: int = 4096, convolutions: int = 1) -> ModelCosts:
    """Encoder and decoder with one long skip a level; sizes halve on the way down."""
    steps: list[StepCost] = []
    sizes = [size]
    skips: list[int] = []

    def add(name: str, inputs: tuple[int, ...], out: int, *, expensive: bool) -> int:
        sizes.append(out)
        made = len(sizes) - 1
        saved = inputs if expensive else (made,)
        flops = float(out * (50 if expensive else 1))
        free = flops if expensive else 0.0
        steps.append(
            StepCost(name, inputs, (made,), saved, 0, flops, 2 * flops, free, 0, 0, 16, expensive)
        )
        return made

    def convolve(name: str, tensor: int, out: int) -> int:
        for number in range(convolutions):
            tensor = add(f"{name}_conv{number}", (tensor,), out, expensive=True)
            tensor = add(f"{name}_relu{number}", (tensor,), out, expensive=False)
        return tensor

    tensor = 0
    for level in range(depth):
        tensor = convolve(f"down{level}", tensor, size >> level)
        skips.append(tensor)
        tensor = add(f"down{level}_pool", (tensor,), size >> (level + 1), expensive=False)
    for level in reversed(range(depth)):
        tensor = convolve(f"up{level}", tensor, size >> level)
        joined = (tensor, skips[level])
        tensor = add(f"up{level}_concat", joined, 2 * size >> level, expensive=False)
    return ModelCosts(
        tuple(steps), tuple(sizes), (False, *(True,) * (len(sizes) - 1)), (0,), (tensor,)
    )


def densenet(blocks: int, layers: int, size: int = 512) -> ModelCosts:
    """Every step of a block reads all that the block has made before it."""
    steps: list[StepCost] = []
    sizes = [size]
    tensor = 0
    for block in range(blocks):
        features = [tensor]
        for layer in range(layers):
            sizes.append(size)
            made = len(sizes) - 1
            steps.append(
                StepCost(
                    f"block{block}_layer{layer}",
                    tuple(features),
                    (made,),
                    (made,),
                    residual_bytes=size * len(features),
                    forward_flops=float(len(features)),
                    backward_flops=2.0 * len(features),
                    expensive=layer % 2 == 0,
                )
            )
            features.append(made)
        tensor = features[-1]
    return ModelCosts(
        tuple(steps), tuple(sizes), (False, *(True,) * (len(sizes) - 1)), (0,), (tensor,)
    )


def resnet(blocks: int, size: int = 1024) -> ModelCosts:
    """Convolution, BatchNorm, ReLU, convolution, BatchNorm, Add, ReLU; the Add skips the block."""
    steps: list[StepCost] = []
    sizes = [size]
    tensor = 0

    def add(name: str, inputs: tuple[int, ...], saved: str, flops: float, free: float) -> int:
        sizes.append(size)
        out = len(sizes) - 1
        kept = {"input": inputs, "output": (out,), "nothing": ()}[saved]
        steps.append(
            StepCost(name, inputs, (out,), kept, 0, flops, 2 * flops, free, expensive=flops > 10)
        )
        return out

    for block in range(blocks):
        skip = tensor
        for half in range(2):
            name = f"block{block}_{half}"
            tensor = add(f"{name}_conv", (tensor,), "input", 100.0, 100.0)
            tensor = add(f"{name}_norm", (tensor,), "input", 2.0, 1.0)
            if half:
                tensor = add(f"{name}_add", (tensor, skip), "nothing", 1.0, 1.0)
            tensor = add(f"{name}_relu", (tensor,), "output", 1.0, 0.0)
    return ModelCosts(
        tuple(steps), tuple(sizes), (False, *(True,) * (len(sizes) - 1)), (0,), (tensor,)
    )

"""Trains a deep ResNet twice from one seed, plain and checkpointed, and compares the two runs.

    make demo                                    # or:
    python examples/demo_resnet.py --help

The losses have to be equal and the peak memory has to be lower, or the demo fails. The model is
ResNet-110 for small images (He et al. 2016), the images are scikit-learn's handwritten digits. It
runs on the CPU whatever the machine has, so that the figures of two machines can be compared.

Training amplifies every rounding: if the last bit of one gradient changes, the loss of this model
differs by some per cent after sixty steps. So TensorFlow is told here to leave the order of
arithmetic alone. Nothing is left to round differently then, and whatever differs is a fault.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before TensorFlow is imported: the CPU gets the allocator that GPUs use, which keeps books on
# peak memory, and only errors are printed.
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits

import keras_ckpt
from keras_ckpt import memory

TOLERANCE = 1e-6  # How far apart two losses may be, relative to the loss.


# 1. The model. Only its last line is not plain Keras: it was `keras.Model(inputs, outputs)`.


def convolution(x: Any, filters: int, size: int = 3, strides: int = 1, gamma: str = "ones") -> Any:
    x = layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
    return layers.BatchNormalization(momentum=0.9, gamma_initializer=gamma)(x)


def block(x: Any, filters: int, strides: int) -> Any:
    # Gamma starts at zero: each block begins as an identity, so that a deep model trains at once.
    y = layers.ReLU()(convolution(x, filters, strides=strides))
    y = convolution(y, filters, gamma="zeros")
    skip = convolution(x, filters, size=1, strides=strides) if strides > 1 else x
    return layers.ReLU()(layers.Add()([skip, y]))


def resnet(depth: int, width: int, image_size: int, checkpoints: Any) -> keras.Model:
    """A ResNet of 6n + 2 layers: three stages of n blocks, each stage twice as wide."""
    inputs = keras.Input((image_size, image_size, 1))
    x = layers.ReLU()(convolution(inputs, width))
    for stage in range(3):
        for i in range((depth - 2) // 6):
            x = block(x, width * 2**stage, strides=2 if stage > 0 and i == 0 else 1)
    outputs = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
    name = f"resnet{depth}"
    return keras_ckpt.CheckpointedModel(inputs, outputs, name=name, checkpoints=checkpoints)


# 2. One run: train, look at held-out images, measure some more steps.


@dataclass
class Run:
    losses: list[float]
    accuracy: float
    step_seconds: float
    report: memory.Report


class ProgressBar(keras.callbacks.Callback):
    """Shows how far a training run is, and takes the time of its steps."""

    def __init__(self, progress: Progress, name: str, steps: int) -> None:
        super().__init__()
        self.progress = progress
        self.task = progress.add_task(name, total=steps, status="tracing the first step")
        self.step_seconds: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step_seconds.append(time.perf_counter() - self.started)
        self.progress.update(self.task, advance=1, status=f"loss {logs['loss']:.4f}")

    def on_train_end(self, logs: Any = None) -> None:
        self.progress.update(self.task, status="measuring memory and time")


def digits(image_size: int, count: int | None) -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    images = tf.image.resize(images, (image_size, image_size)).numpy()
    return images[:count], labels[:count]


def train(name: str, checkpoints: Any, options: argparse.Namespace, progress: Progress) -> Run:
    keras.utils.clear_session()
    keras.utils.set_random_seed(options.seed)
    images, labels = digits(options.image_size, options.images)
    held_out = len(images) // 5
    batches = (
        tf.data.Dataset.from_tensor_slices((images[held_out:], labels[held_out:]))
        .shuffle(len(images), seed=options.seed)
        .batch(options.batch_size, drop_remainder=True)
    )
    model = resnet(options.depth, options.width, options.image_size, checkpoints)
    model.compile(
        keras.optimizers.SGD(options.learning_rate, momentum=0.9, nesterov=True),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    bar = ProgressBar(progress, name, options.epochs * len(batches))
    fit = model.fit(batches, epochs=options.epochs, shuffle=False, verbose=0, callbacks=[bar])
    predicted = model(images[:held_out], training=False).numpy().argmax(axis=1)
    report = memory.profile(model, batches, steps=3)
    progress.update(bar.task, status="done")
    accuracy = float(np.mean(predicted == labels[:held_out]))
    step_seconds = float(np.median(bar.step_seconds))
    return Run(fit.history["loss"], accuracy, step_seconds, report)


# 3. The comparison.


def difference(plain: Run, checkpointed: Run) -> float:
    """The largest difference of two losses, relative to the loss."""
    return float(np.max(np.abs(np.divide(checkpointed.losses, plain.losses) - 1)))


def comparison(plain: Run, checkpointed: Run, title: str) -> Table:
    table = Table(title=title)
    table.add_column()
    for heading in ("plain", "checkpointed", "ratio"):
        table.add_column(heading, justify="right")

    def row(label: str, a: float, b: float, form: str) -> None:
        table.add_row(label, form.format(a), form.format(b), f"{b / a:.3f}")

    for i, losses in enumerate(zip(plain.losses, checkpointed.losses, strict=True)):
        row(f"loss, epoch {i + 1}", *losses, "{:.6f}")
    row("accuracy on held-out images", plain.accuracy, checkpointed.accuracy, "{:.1%}")
    table.add_section()
    peaks = [run.report.peak_bytes / 2**20 for run in (plain, checkpointed)]
    row("peak memory above resting", *peaks, "{:.1f} MiB")
    milliseconds = [1000 * run.step_seconds for run in (plain, checkpointed)]
    row("time per train step (median)", *milliseconds, "{:.0f} ms")
    return table


def faults(plain: Run, checkpointed: Run) -> list[str]:
    """What keeps the two runs from proving the claim."""
    found = []
    if not difference(plain, checkpointed) <= TOLERANCE:
        found.append(f"the losses differ by more than rounding ({TOLERANCE:.0e})")
    if checkpointed.report.peak_bytes > 0.9 * plain.report.peak_bytes:
        found.append("the checkpointed run takes more than 90 % of the plain run's memory")
    return found


# 4. The command.


def checkpoints_option(text: str) -> Any:
    """A mode, a number of segments, or names of layers with commas between."""
    if text.isdigit():
        return int(text)
    return text.split(",") if "," in text else text


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=str(__doc__).split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--depth", type=int, default=110, help="layers: 6n + 2")
    add("--width", type=int, default=8, help="channels of the first stage")
    add("--epochs", type=int, default=4, help="passes over the images")
    add("--batch-size", type=int, default=64, help="images per train step")
    add("--images", type=int, default=1797, help="how many of the 1797 images to use")
    add("--image-size", type=int, default=16, help="height and width that images are enlarged to")
    add("--learning-rate", type=float, default=0.05, help="of SGD with momentum")
    add("--seed", type=int, default=0, help="of the weights and of the order of images")
    help_text = "what to keep: a mode, a number of segments, or names of layers (a,b,c)"
    add("--checkpoints", type=checkpoints_option, default="memory", help=help_text)
    add("--output", type=Path, default=Path("demo-output"), help="folder of the results")
    options = parser.parse_args()
    if options.depth < 8 or options.depth % 6 != 2:
        parser.error(f"--depth has to be 6n + 2, such as 20, 56 or 110; received {options.depth}")
    images = min(options.images, 1797)
    if images - images // 5 < options.batch_size:
        parser.error("--batch-size is larger than the four fifths of --images that are trained on")
    return options


def main() -> int:
    options = parse_options()
    options.output.mkdir(parents=True, exist_ok=True)
    # The two runs are different graphs, and an optimizer that moves factors about would round them
    # differently. Operations, too, shall sum in a fixed order, however many cores there are.
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    tf.config.experimental.enable_op_determinism()

    started = time.perf_counter()
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    columns += (TimeElapsedColumn(), TextColumn("{task.fields[status]}"))
    with Progress(*columns, console=console) as progress:
        plain = train("plain", False, options, progress)
        gc.collect()
        checkpointed = train("checkpointed", options.checkpoints, options, progress)

    reports = {"plain": plain.report, "checkpointed": checkpointed.report}
    memory.compare(reports).plot(options.output / "memory.png")
    plan = f"{checkpointed.report.plan}\n"
    (options.output / "plan.txt").write_text(plan, encoding="utf-8")
    apart = difference(plain, checkpointed)
    lines = (
        comparison(plain, checkpointed, f"ResNet-{options.depth}, batch size {options.batch_size}"),
        f"Largest difference of two losses: {apart:.1e} of the loss"
        if apart
        else "The losses are equal to the last bit.",
        plan.splitlines()[0],
    )
    with (options.output / "table.txt").open("w", encoding="utf-8") as file:
        for out in (console, Console(file=file, width=100)):
            out.print(*lines, sep="\n", soft_wrap=True)
    console.print(f"{time.perf_counter() - started:.0f} s; results are in {options.output}/")

    found = faults(plain, checkpointed)
    for fault in found:
        console.print(f"FAILED: {fault}", soft_wrap=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

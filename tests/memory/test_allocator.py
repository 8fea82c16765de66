import os
import subprocess
import sys

import pytest
import tensorflow as tf

from keras_ckpt.memory.allocator import available, bytes_in_use, measuring, require_figures

MIB = 2**20


def empty(mib):
    return tf.raw_ops.Empty(shape=[int(mib * 4), MIB // 4], dtype=tf.uint8, init=False)


def run(program, **environment):
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("mib", [1, 1.5, 3, 20, 33, 66, 100, 132.5, 200, 260])
def test_the_peak_is_what_was_requested(mib):
    with measuring() as memory:
        empty(mib)
    assert memory.peak_bytes == pytest.approx(mib * MIB, abs=4096)


def test_free_chunks_of_earlier_computations_change_nothing():
    # Without care, a request of 132.5 MiB would take a free chunk of 256 MiB whole.
    kept, dropped = [], [empty(mib) for mib in (256, 40, 7, 1.25)]
    for _ in range(3):
        kept.append(empty(3))
        dropped.append(empty(90))
    dropped.clear()
    for mib in (132.5, 50, 1):
        with measuring() as memory:
            kept.append(empty(mib))
        assert memory.peak_bytes == pytest.approx(mib * MIB, abs=4096)


def test_resting_memory_is_what_was_there_before():
    before = bytes_in_use()
    resting = empty(64)
    with measuring() as memory:
        empty(8)
    assert memory.resting_bytes - before == pytest.approx(64 * MIB, abs=4096)
    assert bytes_in_use() - before == pytest.approx(64 * MIB, abs=4096)
    del resting
    assert bytes_in_use() == before


def test_a_compiled_computation_with_a_known_answer():
    @tf.function(jit_compile=True)
    def eight_products(x, weights):
        kept = [x]
        for _ in range(8):
            kept.append(kept[-1] @ weights)
        total = 0.0
        while kept:  # From the last to the first, so that all of them have to be kept.
            total = tf.reduce_sum(kept.pop() * tf.cos(total))
        return total

    x, weights = tf.ones([2**14, 64]), tf.eye(64)  # 4 MiB each product
    eight_products(x, weights)
    readings = []
    for _ in range(3):
        with measuring() as memory:
            eight_products(x, weights)
        readings.append(memory.peak_bytes)
    assert len(set(readings)) == 1
    # Seven are kept in one buffer; the last one may be folded into its sum.
    assert 28 * MIB <= readings[0] < 33 * MIB


def test_available_falls_by_what_is_taken():
    assert 0 < available() <= 2**36


def test_the_peak_is_there_after_an_error():
    def fail():
        empty(5)
        raise ArithmeticError

    with pytest.raises(ArithmeticError), measuring() as memory:
        fail()
    assert memory.peak_bytes == pytest.approx(5 * MIB, abs=4096)


def test_an_allocator_that_does_not_count_is_refused():
    program = "from keras_ckpt.memory.allocator import *\nwith measuring(): pass"
    result = run(program, TF_CPU_ALLOCATOR_USE_BFC="0")
    assert "RuntimeError" in result.stderr
    assert "TF_CPU_ALLOCATOR_USE_BFC=1 before TensorFlow is imported" in result.stderr


def test_under_a_limit_the_allocator_can_still_be_read():
    program = (
        "import tensorflow as tf\n"
        "from keras_ckpt.memory.allocator import available, measuring\n"
        "with measuring() as memory:\n"
        "    tf.zeros([2**20, 4])\n"
        "print(memory.peak_bytes // 2**20, available() // 2**20)"
    )
    result = run(program, TF_CPU_BFC_MEM_LIMIT_IN_MB="64")
    assert result.stdout.split() == ["16", "64"], result.stderr


def test_a_readable_allocator_passes():
    require_figures("CPU:0")

"""Sets the environment of every test, before anything can import TensorFlow.

Tests of planners and plans import no TensorFlow, so nothing here may import it either.
"""

import os

# The allocator that GPUs use: with it, peak memory can be read on a CPU too.
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Two test processes share the cores. Threads between operations stay as they are: that
# operations run at the same time is part of what the tests look at.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")

"""Measured memory: what a train step really takes, when, and for what."""

from keras_ckpt.memory.compare import Comparison, compare
from keras_ckpt.memory.profile import profile
from keras_ckpt.memory.report import Holder, Holders, Report
from keras_ckpt.memory.timeline import Row

__all__ = ["Comparison", "Holder", "Holders", "Report", "Row", "compare", "profile"]

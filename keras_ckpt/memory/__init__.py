"""Measured memory: what a train step really takes, when, and for what."""

from keras_ckpt.memory.profile import profile
from keras_ckpt.memory.report import Report

__all__ = ["Report", "profile"]

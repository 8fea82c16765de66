"""Measured memory."""

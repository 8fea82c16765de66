"""Planners: pure functions from the costs of a model's steps to segments.

None of them knows TensorFlow. `simulate` replays what any of them returns.
"""

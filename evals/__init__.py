"""Evaluation of checkpoints and running engines."""

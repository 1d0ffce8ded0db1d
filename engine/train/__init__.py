"""Batches in, updated weights out."""

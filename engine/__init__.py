"""Farfield's engine: asynchronous RL post-training of language models. Start reading at `engine/loop.py`."""

"""Rewards of a user's own, good and hostile, named in tests as `reward_functions:NAME`."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from typing import Any

Answer = dict[str, Any]


def length_share(completion: str, answer: Answer) -> float:
    wanted = answer["answer"]
    return len(completion) / (wanted["longest"] if isinstance(wanted, dict) else len(wanted))


def sleeps(completion: str, answer: Answer) -> float:
    """As long as the completion says."""
    time.sleep(float(completion))
    return 1.0


def spins(completion: str, answer: Answer) -> float:
    if completion == "fine":
        return 1.0
    while True:
        pass


def towers(completion: str, answer: Answer) -> float:
    """5^(5^(5^(5^5))): one call that never returns to Python, and eats memory."""
    base = len(completion) + 1
    return float(base ** (base ** (base ** (base**base))) > 0)


def eats_2_gib(completion: str, answer: Answer) -> float:
    return 1.0 if completion == "fine" else float(len(bytearray(b"x") * 2**31))


def segfaults(completion: str, answer: Answer) -> float:
    return 1.0 if completion == "fine" else float(ctypes.string_at(0)[0])


def eats_memory(completion: str, answer: Answer) -> float:
    hoard = [b"x"]
    while completion != "fine":
        hoard.append(bytes(2**24))
        time.sleep(0.04 if completion == "slowly" else 0)
    return 1.0


def leaves(completion: str, answer: Answer) -> float:
    return 1.0 if completion == "fine" else sys.exit(0)


def raises(completion: str, answer: Answer) -> float:
    if completion == "fine":
        return 1.0
    raise KeyError("no such key in my table")


def is_no_number(completion: str, answer: Answer) -> float:
    return float("nan")


def chatters(completion: str, answer: Answer) -> float:
    """Touches the streams that a worker might need, and leaves a child behind."""
    print("noise" * 10_000)
    os.write(1, b"more noise")
    subprocess.Popen(["sleep", "600"])
    return float(sys.stdin.read() == "")


def has_heavy_imports(completion: str, answer: Answer) -> float:
    return float(bool({"torch", "numpy", "transformers", "reasoning_gym"} & set(sys.modules)))


def own_pid(completion: str, answer: Answer) -> float:
    return float(os.getpid())


def pid_then_hangs(completion: str, answer: Answer) -> float:
    with open(completion, "w") as file:
        file.write(f"{os.getpid()} {os.getpgrp()} {os.getsid(0)}\n")
    while True:
        time.sleep(60)


not_a_function = 5


def forgets_to_return(completion: str, answer: Answer) -> None:
    pass

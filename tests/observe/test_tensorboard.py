"""What TensorBoard itself reads back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from engine.observe.tensorboard import TensorBoardLog


def test_numbers_are_scalars_at_their_step_and_nulls_are_left_out(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path)
    log.write({"step": 1, "reward/mean": 0.25, "loss": float("nan"), "skipped": "loss is not finite", "lr": None})
    log.write({"step": 2, "reward/mean": 0.5, "loss": -1.5, "skipped": None})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = events.Tags()["tensors"]
    read = {tag: [(event.step, make_ndarray(event.tensor_proto).item()) for event in events.Tensors(tag)]
            for tag in tags}  # fmt: skip
    assert read == {"reward/mean": [(1, 0.25), (2, 0.5)], "loss": [(2, -1.5)]}
    assert events.SummaryMetadata("loss").plugin_data.plugin_name == "scalars"


def test_writing_needs_no_torch_and_importing_no_tensorboard(tmp_path: Path) -> None:
    code = f"""
import sys, pathlib
from engine.observe.tensorboard import TensorBoardLog
assert "tensorboard" not in sys.modules
TensorBoardLog(pathlib.Path({str(tmp_path)!r})).close()
assert not {{"torch", "tensorflow"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)

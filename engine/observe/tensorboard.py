"""The metrics rows once more, for TensorBoard."""

from __future__ import annotations

from pathlib import Path

from engine.observe.metrics import Row, number


class TensorBoardLog:
    """tensorboard/ in the run's folder: one scalar per number of a row; nulls and texts are left out."""

    def __init__(self, folder: Path) -> None:
        # Takes most of a second to import. This writer, unlike torch's, needs numpy only.
        from tensorboard.summary import Writer

        self._writer = Writer(str(folder / "tensorboard"))

    def write(self, row: Row) -> None:
        """Add the row at its `step`."""
        for name, value in row.items():
            scalar = number(value)
            if scalar is not None and name != "step":
                self._writer.add_scalar(name, scalar, row["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

"""Several trainer ranks on one host: the learner (rank 0) tells the others what to do, over a local ZeroMQ socket.

    learner ──Start, Step, Gather, Offload, Onload, Stop──▶ rank      ROUTER in the training thread, DEALER
    learner ◀────────────────────Hello ─────────────────── rank
    learner ◀───────────────────Failed──────────────────── rank      PULL on the event loop, PUSH

torch.distributed carries the tensors. A rank waits for its next command on the socket, in no collective. One that has
failed says so and waits to be told to leave: the run ends with its traceback, not with the others' broken connections.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Literal, Self

import msgspec
import torch
import torch.distributed as dist
import zmq
import zmq.asyncio
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from engine.config import Config
from engine.errors import StalledError, TrainingError
from engine.train.thread import stay_on, training_cores
from engine.train.trainer import TorchTrainer
from engine.types import Batch, MicroBatch, decode_array, encode_array

_FOLDER = "ranks"
# How long a rank waits for torchrun's store and the learner's address, which comes before anything slow.
_MEETING_S = 600.0
_LOOK_UP_S = 0.2
_FAREWELL_S = 5.0


class Start(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Build the trainer, with the ranks below `ranks`; the others only wait for the end."""

    config: Config
    folder: str
    reference_folder: str | None
    ranks: int


class Step(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One optimizer step on this rank's micro-batches."""

    micro_batches: tuple[MicroBatch, ...]
    temperature: float


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Take part in putting the whole parameters together."""


class Offload(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Leave the device to the generator."""

    what: Literal["optimizer", "all"]


class Onload(msgspec.Struct, frozen=True, tag=True):
    """Take back what left it."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave."""


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """Something raised; nothing more comes from this rank."""

    rank: int
    traceback: str


Command = Start | Step | Gather | Offload | Onload | Stop
_decoder = msgspec.msgpack.Decoder(Command, dec_hook=decode_array)


class World(msgspec.Struct, frozen=True):
    """torchrun's part of the environment: `World(rank=0, size=2, local_rank=0)`."""

    rank: int
    size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> Self:
        """A world of one where torchrun did not start this process."""
        names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
        return cls(*(int(os.environ.get(name, default)) for name, default in names.items()))


def _store(world: World, limit_s: float) -> Store:
    """The key-value store at torchrun's MASTER_ADDR and MASTER_PORT."""
    found = rendezvous("env://", world.rank, world.size, timeout=timedelta(seconds=limit_s))
    store, _, _ = next(iter(found))
    return PrefixStore("farfield", store)


def _join_trainers(store: Store, rank: int, ranks: int, limit_s: float) -> None:
    """The default process group, of the trainer ranks alone."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend, store=PrefixStore("trainers", store), rank=rank, world_size=ranks,
        timeout=timedelta(seconds=limit_s),
    )


class Learner:
    """Rank 0's end: a `trainer.Team`. `watch` runs on the event loop; `trainer` and the team's commands in the training
    thread, between which `close` may come from any other.

    Raises:
        TrainingError: a rank has gone.
    """

    def __init__(self, world: World, ranks: int, limit_s: float) -> None:
        self.ranks, self._limit_s = ranks, limit_s
        self._others = [str(rank).encode() for rank in range(1, world.size)]
        self._folder = Path(tempfile.mkdtemp(prefix="farfield-ranks-"))
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.ROUTER)
        self._commands.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._commands.bind(f"ipc://{self._folder}/commands")
        self._failures = self._context.socket(zmq.PULL)
        self._failures.bind(f"ipc://{self._folder}/failures")
        self._commanding = threading.Lock()
        self._closed = False
        self._store = _store(world, limit_s)
        self._store.set(_FOLDER, str(self._folder))

    def trainer(self, config: Config, folder: Path, reference_folder: Path | None) -> TorchTrainer:
        """Build the trainer, on every rank at once.

        Raises:
            StalledError: a rank did not report in time.
        """
        self._await_hellos()
        reference = None if reference_folder is None else str(reference_folder)
        start = Start(config=config, folder=str(folder), reference_folder=reference, ranks=self.ranks)
        self._tell(self._others, start)
        if self.ranks > 1:
            _join_trainers(self._store, 0, self.ranks, self._limit_s)
        return TorchTrainer(config, folder, ranks=self.ranks, team=self, reference_folder=reference_folder)

    def step(self, batch: Batch) -> None:
        """See `trainer.Team.step`."""
        for identity, micro_batches in zip(self._others, batch.micro_batches[1:], strict=False):
            self._tell([identity], Step(micro_batches=micro_batches, temperature=batch.temperature))

    def gather(self) -> None:
        """See `trainer.Team.gather`."""
        self._tell_trainers(Gather())

    def offload(self, what: Literal["optimizer", "all"]) -> None:
        """See `trainer.Team.offload`."""
        self._tell_trainers(Offload(what=what))

    def onload(self) -> None:
        """See `trainer.Team.onload`."""
        self._tell_trainers(Onload())

    async def watch(self) -> None:
        """Returns never.

        Raises:
            TrainingError: a rank failed; with its traceback.
        """
        failures = zmq.asyncio.Socket.from_socket(self._failures)
        failed = msgspec.msgpack.decode(await failures.recv(), type=Failed)
        raise TrainingError(f"trainer rank {failed.rank} failed:\n{failed.traceback.rstrip()}",
                            remedy="the traceback names the place")

    def close(self) -> None:
        """Tell every rank to leave. One that sits in a collective leaves when it misses this process."""
        with self._commanding:
            self._closed = True
            for identity in self._others:
                with contextlib.suppress(TrainingError):  # it never came, or has left
                    self._send(identity, Stop())
            self._context.destroy(linger=1000)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _await_hellos(self) -> None:
        missing = set(self._others)
        end = time.monotonic() + self._limit_s
        while missing:
            if time.monotonic() > end:
                names = ", ".join(sorted(identity.decode() for identity in missing))
                raise StalledError(f"trainer rank {names} did not report within {self._limit_s} s",
                                   remedy="look at its output, or raise run.stage_timeout_s")
            # In short looks: `close` may come meanwhile, in another thread.
            with self._commanding:
                self._require_open()
                if self._commands.poll(int(1000 * _LOOK_UP_S)):
                    missing.discard(self._commands.recv_multipart()[0])

    def _tell_trainers(self, command: Command) -> None:
        self._tell(self._others[: self.ranks - 1], command)

    def _tell(self, identities: Sequence[bytes], command: Command) -> None:
        with self._commanding:
            self._require_open()
            for identity in identities:
                self._send(identity, command)

    def _send(self, identity: bytes, command: Command) -> None:
        try:
            self._commands.send_multipart([identity, msgspec.msgpack.encode(command, enc_hook=encode_array)])
        except zmq.ZMQError as error:
            raise TrainingError(f"trainer rank {identity.decode()} has gone",
                                remedy="torchrun's output says how it ended") from error

    def _require_open(self) -> None:
        if self._closed:
            raise TrainingError("the run is ending")


def serve_rank(world: World) -> int:
    """A rank above 0, from its start to the learner's Stop; returns the exit code. It obeys the learner alone: signals
    are the learner's to answer."""
    store = _store(world, _MEETING_S)
    folder = store.get(_FOLDER).decode()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    context = zmq.Context()
    commands = context.socket(zmq.DEALER)
    commands.setsockopt(zmq.IDENTITY, str(world.rank).encode())
    _leave_without_learner(commands.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED))
    commands.connect(f"ipc://{folder}/commands")
    commands.send(b"")
    try:
        _obey(commands, store, world)
        return 0
    except Exception:
        traceback.print_exc()
        failures = context.socket(zmq.PUSH)
        failures.connect(f"ipc://{folder}/failures")
        failures.send(msgspec.msgpack.encode(Failed(rank=world.rank, traceback=traceback.format_exc())))
        # Until the learner has heard it: the others' connections to this rank break when it leaves.
        if commands.poll(int(1000 * _FAREWELL_S)):
            commands.recv()
        return 1


def _obey(commands: zmq.Socket[bytes], store: Store, world: World) -> None:
    trainer: TorchTrainer | None = None
    while True:
        match _decoder.decode(commands.recv()):
            case Start(config=config, folder=folder, reference_folder=reference, ranks=ranks):
                if world.rank >= ranks:
                    continue  # its device is the generator's
                if torch.cuda.is_available():
                    torch.cuda.set_device(world.local_rank)
                if (cores := training_cores(config.schedule, world.rank, ranks)) is not None:
                    stay_on(cores)
                _join_trainers(store, world.rank, ranks, config.run.stage_timeout_s)
                reference_folder = None if reference is None else Path(reference)
                trainer = TorchTrainer(config, Path(folder), ranks=ranks, reference_folder=reference_folder)
            case Step(micro_batches=micro_batches, temperature=temperature):
                assert trainer is not None
                trainer.step_on_rank(micro_batches, temperature)
            case Gather():
                assert trainer is not None
                trainer.gather_on_rank()
            case Offload(what=what):
                assert trainer is not None
                trainer.offload_on_rank(what)
            case Onload():
                assert trainer is not None
                trainer.onload_on_rank()
            case Stop():
                return


def _leave_without_learner(monitor: zmq.Socket[bytes]) -> None:
    """End this process, whatever it is doing, once the learner is gone. One that was told to Stop ends before."""

    def wait() -> None:
        monitor.recv_multipart()
        time.sleep(_FAREWELL_S)
        os._exit(1)

    threading.Thread(target=wait, name="learner watch", daemon=True).start()

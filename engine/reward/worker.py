"""A scoring process: `python -m engine.reward.worker MEMORY_MIB PARENT_PID`, jobs on stdin, replies on stdout."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import traceback
from typing import BinaryIO

import msgspec

from engine.errors import ScoringError
from engine.reward.scoring import HEADER_BYTES, Failure, Job, Reply, Started, frame, prepare

_PR_SET_PDEATHSIG = 1


def main() -> None:
    memory_mib, parent = int(sys.argv[1]), int(sys.argv[2])
    _end_with(parent)
    limit = memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A scorer may print or read: neither touches our pipes, and its own children do not inherit them.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    serve(requests, replies)


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Score one job after the other until the parent closes its end."""
    decoder = msgspec.msgpack.Decoder(Job)
    while len(header := requests.read(HEADER_BYTES)) == HEADER_BYTES:
        job = decoder.decode(requests.read(int.from_bytes(header, "little")))
        _send(replies, _score(job, replies))


def _score(job: Job, replies: BinaryIO) -> Reply:
    try:
        judge = prepare(job)
        _send(replies, Started())
        return judge()
    except MemoryError:
        # Half of what the scorer built may still be about: a fresh process is cheaper than finding out.
        os._exit(1)
    except ScoringError as error:
        return Failure(error.args[0], error.remedy)
    except Exception:
        return Failure(traceback.format_exc())


def _send(replies: BinaryIO, reply: Reply) -> None:
    replies.write(frame(reply))
    replies.flush()


def _end_with(parent: int) -> None:
    """Even a hung worker ends when the parent is killed; an idle one sees its input end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    main()

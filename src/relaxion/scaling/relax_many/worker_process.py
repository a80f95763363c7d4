"""Where local workers come from: a process that has loaded everything and forks, so that a new one costs no seconds.

`python -P -m relaxion.scaling.relax_many.worker_process FD` takes settings and the worker's end of a socket pair over
the socket FD, forks, answers with the process id. It ends with the driver, and the workers with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from typing import Any

FATAL, READY = "fatal", "ready"
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG, Linux


def main() -> None:
    """Wait for orders."""
    _die_with(os.getppid())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children; the driver sees their sockets close
    orders = socket.socket(fileno=int(sys.argv[1]))
    import relaxion.scaling.relax_many.worker  # noqa: F401 - loaded here, once, for every child

    while True:
        message, handles, _, _ = socket.recv_fds(orders, 1 << 16, 1)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            _live(orders, message, handles[0])
        os.close(handles[0])
        orders.sendall(f"{pid}\n".encode())


def _live(orders: socket.socket, message: bytes, handle: int) -> None:
    """All that a worker does; never returns."""
    code = 1
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        _die_with(os.getppid())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # calculators may wait for programs of theirs
        orders.close()
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what calculators print is no result
        _serve(socket.socket(fileno=handle), message)
        code = 0
    os._exit(code)  # without the clean-up that belongs to the parent


def _serve(driver: socket.socket, message: bytes) -> None:
    from relaxion.errors import RelaxionError
    from relaxion.scaling.relax_many.settings import WorkerSettings
    from relaxion.scaling.relax_many.worker import Worker

    stream = driver.makefile("rw", encoding="utf-8", newline="\n")

    def say(line: str) -> None:
        stream.write(line + "\n")
        stream.flush()

    try:
        worker = Worker(WorkerSettings.read(json.loads(message)))
    except RelaxionError as error:
        say(json.dumps({FATAL: str(error)}))
        return
    say(json.dumps({READY: True}))
    for line in stream:
        for record in worker.records(json.loads(line)):
            say(record)
        say("{}")


def _die_with(parent: int) -> None:
    """Nobody is left behind when the driver is killed."""
    if sys.platform == "linux":
        library: Any = ctypes.CDLL(None)
        library.prctl(DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it went before we could ask
        os._exit(1)


if __name__ == "__main__":
    main()

"""The live page served from a thread, beside the test that asks it."""

from __future__ import annotations

import threading
from typing import Any, Self

from relaxion.apps.report.live import Board, free_socket, server


class InThread:
    """The server beside other work."""

    def __init__(self, board: Board, port: int = 0) -> None:
        self._socket = free_socket(port)
        self._server = server(board, self._socket)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    @property
    def port(self) -> int:
        return self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=600)
        self._socket.close()

"""One pool of workers for everything that runs on several processes or machines: local processes, or Ray."""

from relaxion.workers.driver import TaskDriver, WorkerTask
from relaxion.workers.pool import LocalPool, News, WorkerPlace, WorkerPool

__all__ = ["LocalPool", "News", "TaskDriver", "WorkerPlace", "WorkerPool", "WorkerTask"]

"""One pool of workers for everything that runs on several processes or machines: local processes, or Ray."""

from relaxion.workers.pool import LocalPool, News, TaskDriver, WorkerPlace, WorkerPool, WorkerTask

__all__ = ["LocalPool", "News", "TaskDriver", "WorkerPlace", "WorkerPool", "WorkerTask"]

"""Who uses it: the ASE optimizer and the classical core behind it."""

from relaxion.optimize.relaxer import HistoryEntry, Relaxer

__all__ = ["HistoryEntry", "Relaxer"]

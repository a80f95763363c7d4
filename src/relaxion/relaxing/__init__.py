"""Who uses it: the ASE optimizer and the classical core behind it."""

from relaxion.relaxing.relaxer import HistoryEntry, Relaxer

__all__ = ["HistoryEntry", "Relaxer"]

"""What atoms are: structures, their graph, the state of a relaxation, conversion, data sets."""

from relaxion.structures.state import Evaluation, Graph, Outcome, State
from relaxion.structures.structures import Move, Structures

__all__ = ["Evaluation", "Graph", "Move", "Outcome", "State", "Structures"]

"""What atoms are: structures, their graph, the state of a relaxation, conversion, data sets."""

from relaxion.structures.graph import Graph
from relaxion.structures.move import Move
from relaxion.structures.state import Evaluation, Outcome, State
from relaxion.structures.structures import Structures

__all__ = ["Evaluation", "Graph", "Move", "Outcome", "State", "Structures"]

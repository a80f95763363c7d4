"""From a structure to its stiffness or a move, and policy files."""

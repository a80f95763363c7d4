"""From a state to a move or a value."""

"""From a state to a move or a value. `roles` says what agents ask of a network, `vector` answers for control tasks."""

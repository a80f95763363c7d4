"""One step of many relaxations."""

"""Relaxations on disk: the store, the journals that relaxers write, what is in them, and how others' files come in."""

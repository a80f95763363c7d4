"""Transitions and where they come from: environment, replay, exploration, expert, normaliser; Gymnasium tasks."""

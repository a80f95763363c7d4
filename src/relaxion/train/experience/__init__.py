"""Transitions: environments, replay, exploration, expert, rewards."""

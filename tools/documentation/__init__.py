"""What builds the pages of the documentation from the repository itself, so that they cannot drift from it."""

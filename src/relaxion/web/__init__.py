"""Pages: reports, races, the live view of a run."""

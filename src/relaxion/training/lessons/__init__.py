"""Where the lessons of a metric come from: one file per source, and what a run does with each (`plans.py`)."""

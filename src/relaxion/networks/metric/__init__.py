"""The metric policy: a network that says how stiff a structure is, and the step that follows."""

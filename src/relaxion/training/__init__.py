"""Loop and records: trainer, assessment, checkpoints."""

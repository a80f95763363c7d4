"""Settings tried in an Optuna study."""

"""The estimator: its configuration, specs, hooks and runs."""

"""The estimator itself: its configuration, its specs, and what it runs."""

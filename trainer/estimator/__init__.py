"""TensorFlow's Estimator: what it reads, trains and serves, on this trainer's models."""

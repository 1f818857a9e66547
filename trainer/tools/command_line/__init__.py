"""`python -m trainer`: its commands and their output. Modules here import JAX only when a command needs it."""

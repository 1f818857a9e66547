"""`python -m trainer`: what its commands do and print. Modules here import JAX when a command that needs it runs."""

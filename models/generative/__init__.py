"""Generative image models, one family per file."""

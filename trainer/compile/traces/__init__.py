"""Traced programs: what is proved of them, and what is rewritten in them before XLA compiles them."""

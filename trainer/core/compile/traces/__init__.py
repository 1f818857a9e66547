"""Traced programs: proofs about them, and rewrites of them before XLA compiles them."""

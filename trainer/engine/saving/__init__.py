"""Files: checkpoints, weights, exported predictions.

Owns the formats on disk and their integrity. Must not know of the loop or of `Model`.
"""

"""Files: checkpoints, weights, exported predictions.

Owns what lies on the disk and that it is whole. It must not know of the loop or of `Model`.
"""

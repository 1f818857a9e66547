"""The train phase of a model whose steps run on the workers of a `ParameterServerStrategy`.

Owns the data that the chief sends to workers, the computation of a worker, and the view of the loop. The servers turn
gradients into updates.
"""

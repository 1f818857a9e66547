"""The train phase of a model whose steps run on the workers of a `ParameterServerStrategy`.

Owns what the chief hands to workers, what a worker computes of it, and what the loop sees. How gradients become updates
is the servers' matter.
"""

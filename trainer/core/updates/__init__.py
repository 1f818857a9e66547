"""Facts about the updates of parameters: their norms, and which of them are spikes.

It must not know optimizers, states or strategies.
"""

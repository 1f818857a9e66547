"""Asynchronous training: workers pull parameters from servers and push gradients, while a chief hands out the work.

Owns what the processes of a `ParameterServerStrategy` do, and what becomes of work whose process is lost. What a train
step computes is not known here.
"""

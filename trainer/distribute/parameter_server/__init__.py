"""Asynchronous training: workers pull parameters from servers and push gradients, while a chief hands out the work.

Owns the cluster of a `ParameterServerStrategy`: its processes, what travels between them, and what becomes of work whose
process is lost. What a train step computes is not known here.
"""

"""Asynchronous training: workers pull parameters from servers and push gradients, while a chief hands out the work.

Owns the processes of a `ParameterServerStrategy`, and the recovery of work when a process is lost. It must not know the
computation of a train step.
"""

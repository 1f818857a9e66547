"""Noticing that another process of the job has ended or is stuck, and ending this process with the cause.

Owns heartbeats, the connections to process 0, and the diagnosis. It must not start JAX, nor know what is computed.
"""

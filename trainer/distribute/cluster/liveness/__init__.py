"""Detection of ended or stuck processes of the job, which ends this process with the cause.

Owns heartbeats, the connections to process 0, and the diagnosis. It must not start JAX, nor know the computation.
"""

"""Which processes form a cluster, as TF_CONFIG, SLURM, Open MPI or the platform of JAX describe it.

Reads environment variables only: nothing here opens a connection.
"""

"""Processes of a cluster, as described by TF_CONFIG, SLURM, Open MPI or JAX's platform detection.

Reads environment variables only: nothing here opens a connection.
"""

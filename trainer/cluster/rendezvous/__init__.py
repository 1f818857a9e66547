"""All processes of a cluster meet over plain sockets before JAX starts, and compare what must be equal.

Owns these sockets, and how messages travel over them. It must not import JAX: it is not running yet.
"""

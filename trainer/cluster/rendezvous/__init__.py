"""All processes of a cluster meet over plain sockets before JAX starts, and compare what must be equal.

Owns the messages of that meeting. It must not import JAX arrays or devices: JAX is not running yet.
"""

"""Meeting of all processes of a cluster over plain sockets before JAX starts, which compares their settings.

Owns these sockets, and the transport of messages. It must not import JAX, which is not running yet.
"""

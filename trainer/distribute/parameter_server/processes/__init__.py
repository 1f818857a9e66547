"""The processes of a parameter-server cluster: how they are started, called and ended, and what travels between them.

Owns two engines behind one interface, local processes and Ray. What the processes are for is not known here.
"""

"""Processes of a parameter-server cluster: start, calls, messages and end.

Owns two engines behind one interface, local processes and Ray. It must not know the purpose of the processes.
"""

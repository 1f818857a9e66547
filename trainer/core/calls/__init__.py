"""Calls from a script: entry points, and tracebacks that show the script's lines.

It must not know which classes and functions a script may call: each room marks its own.
"""

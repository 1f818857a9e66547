"""What replicas do together: collectives, reductions, gathered parameters, values per replica, custom training loops.

`collectives.py` alone names `psum` and the like. A strategy chooses among these; nothing here chooses.
"""

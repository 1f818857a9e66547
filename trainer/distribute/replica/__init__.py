"""Operations of replicas: collectives, reductions, gathered parameters, values per replica, custom training loops.

Only `collectives.py` names `psum` and other collectives. A strategy chooses among these; nothing here chooses.
"""

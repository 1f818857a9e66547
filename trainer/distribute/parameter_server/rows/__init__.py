"""Tables whose rows are spread over parameter servers: what a server does with its rows, and a step with few of them.

Row r of a table is row r // n of server r % n of n.
"""

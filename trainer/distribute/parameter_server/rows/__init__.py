"""Tables whose rows are spread over parameter servers: the rows of a server, and steps on few rows.

Row r of a table is row r // n of server r % n of n.
"""

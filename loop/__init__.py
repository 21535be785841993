"""The top floor: configuration, command line, and the processes that `kvloop up` keeps alive.

May import everything; nothing imports it.
"""

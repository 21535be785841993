"""`kvloop demo`: the whole story in one run on the bundled model, measured as it goes.

Everything is done as a user would, through the API, the command line's functions and kill -9; nothing is mocked.
"""

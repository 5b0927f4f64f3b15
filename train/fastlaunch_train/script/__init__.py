"""A user's own script: the calls that record its steps, and the command that runs it.

Imports all rooms before it, and torch only if the script has imported it.
"""

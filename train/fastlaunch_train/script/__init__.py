"""A user's own script: what it calls to record its steps, and the command that runs it.

Imports all rooms before it; torch only where the script has imported it.
"""

"""Typed boto3 calls, a file per topic, and what their errors mean; what an account needs, as templates.

May import core, and is the only room that imports boto3.
"""

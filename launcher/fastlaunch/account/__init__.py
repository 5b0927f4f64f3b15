"""What an AWS account needs, as data: the template and the policies.

May import core.
"""

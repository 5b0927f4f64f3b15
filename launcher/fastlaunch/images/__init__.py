"""What a container holds: the code bundle, image build and push, wheels.

May import core, catalog and aws.
"""

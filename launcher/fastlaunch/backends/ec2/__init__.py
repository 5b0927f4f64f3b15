"""The EC2 backend: one attempt is one RunInstances request."""

"""The SageMaker backend: one attempt is one CreateTrainingJob request."""

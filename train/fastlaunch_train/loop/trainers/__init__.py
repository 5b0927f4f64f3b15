"""The same training by other Trainers: Lightning's and Transformers'."""

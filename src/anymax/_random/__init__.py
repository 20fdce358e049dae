"""Randomness: generators of every framework, noises, draws from probabilities, and which classes a truncation keeps."""

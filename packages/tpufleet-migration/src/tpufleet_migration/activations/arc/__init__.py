"""ARC (Abstraction and Reasoning Corpus) tasks: augmentations, grid encoders, prompts."""
